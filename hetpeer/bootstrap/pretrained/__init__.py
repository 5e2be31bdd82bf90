"""Models of transformers: load one by name, keep what belongs to it, write the trained one back."""
