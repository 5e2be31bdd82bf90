"""Identity: a peer's key, its id, and the addresses at which it can be found."""
