"""Rewrites of a traced graph, from calls to calls: fewer numbers to compute, more places to cut."""
