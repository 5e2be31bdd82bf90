"""How long a step of a swarm takes, in virtual time."""
