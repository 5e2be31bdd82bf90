"""What a daemon writes down of what it does, and how that is read: a file in its home (docs/machine.md)."""
