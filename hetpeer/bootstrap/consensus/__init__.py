"""Raft: one log on several reliable peers, and the election of the coordinator among them."""
