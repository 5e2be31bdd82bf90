"""Reachability: whether others can connect to us, relays, and the path to each peer."""
