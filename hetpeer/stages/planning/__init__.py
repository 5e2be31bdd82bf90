"""Duration of a swarm's step, in virtual time."""
