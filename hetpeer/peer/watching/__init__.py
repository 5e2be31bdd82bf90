"""Views of a swarm: status, metrics, pictures."""
