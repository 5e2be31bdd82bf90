"""A block as the worker holds it: weights, training state and slots, each where it has room."""
