"""Arrival in the network of a run, by an invite or an address."""
