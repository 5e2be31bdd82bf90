"""hivemind's DHT node with our rules: signed records, bounded storage, joining."""
