"""The coordinator at work: its core driven by channels, the clock and the disk."""
