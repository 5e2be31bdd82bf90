"""Rosters of a run's peers, and the task board for leftover work."""
