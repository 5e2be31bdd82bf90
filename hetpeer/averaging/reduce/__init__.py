"""A reduce at a holder: who sums how much, parts in, sums out."""
