"""What a machine is fit for, before and beside taking part: `hetpeer doctor` and `hetpeer bench` (docs/machine.md)."""
