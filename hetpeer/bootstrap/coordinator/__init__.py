"""The pure core of the coordinator: one step after the other, committed exactly once."""
