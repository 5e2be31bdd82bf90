"""Alternatives to hetpeer that a user would take, on the same data, model and optimizer: each a script of its
own.
"""
