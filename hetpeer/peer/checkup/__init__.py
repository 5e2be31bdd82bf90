"""Checks and speed of a machine: `hetpeer doctor` and `hetpeer bench` (docs/machine.md)."""
