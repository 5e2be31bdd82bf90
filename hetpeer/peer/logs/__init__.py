"""The log of a daemon: files in its home, written and read (docs/machine.md)."""
