"""The operators that a block may use, and the random numbers that some of them draw."""
