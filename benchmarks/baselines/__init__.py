"""What a user would take instead of hetpeer, on the same data, model and optimizer: each a script of its
own.
"""
