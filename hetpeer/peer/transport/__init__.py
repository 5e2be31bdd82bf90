"""Tensors from volunteer to volunteer: links, memory, what is spilled to disk."""
