"""Frames on streams, and how much a peer may send: flow control, budgets, rates. Pure but for the sockets."""
