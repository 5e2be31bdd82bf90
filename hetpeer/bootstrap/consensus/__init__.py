"""Raft: one log on several reliable peers, and who of them coordinates."""
