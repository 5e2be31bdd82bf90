"""What the coordinator knows: members, leases, time-outs, places, limits."""
