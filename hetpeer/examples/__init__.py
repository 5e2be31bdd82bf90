"""Models to begin with."""
