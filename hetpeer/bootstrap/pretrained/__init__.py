"""Models of transformers: load one by name, adapt it, keep what belongs to it, write the trained one back."""
