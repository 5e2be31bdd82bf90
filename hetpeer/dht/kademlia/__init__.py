"""hivemind's DHT node on our terms: signed records, bounded storage, joining."""
