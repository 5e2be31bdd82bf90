"""Plans from what people write down or a running swarm says of itself."""
