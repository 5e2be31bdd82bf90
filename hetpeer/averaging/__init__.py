"""A volunteer's side of a step, the reduce, the optimizer, and groups that average."""
