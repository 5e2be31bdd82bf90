"""A run and its coordinator: what is decided, logged, stored, checked and audited."""
