"""Spot checks, proofs of sums, and what follows from them."""
