"""State of the coordinator: members, leases, timeouts, places, limits."""
