"""Scenarios on which planners are compared.

Networks and orders were committed before the search for a grid was tuned on them, though after its first
version. The testbeds were not: what a first look at them showed changed the search for swarms in the commit
that corrected them (a689dd1).
"""
