"""Channels: ordered, exactly-once messages over streams that break."""
