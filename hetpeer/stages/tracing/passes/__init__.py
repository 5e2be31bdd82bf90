"""Rewrites of a traced program or graph: fewer numbers to compute, more places to cut, no complex ones."""
