"""From an invite or an address into the network of a run."""
