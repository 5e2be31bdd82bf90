"""The reduce at a holder: shares of each reducer, parts in, sums out."""
