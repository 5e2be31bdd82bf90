"""Whether others can reach us, relays, and which path leads to whom."""
