"""Scenarios on which planners are compared. Committed before any search was tuned on them."""
