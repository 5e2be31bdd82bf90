"""Channels: numbered frames to one peer that survive broken streams."""
