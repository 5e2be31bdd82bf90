"""What a swarm looks like: status, metrics, pictures."""
