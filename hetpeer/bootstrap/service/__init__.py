"""The coordinator's driver: it connects the core to channels, the clock and the disk."""
