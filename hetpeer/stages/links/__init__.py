"""Codecs: activations and gradients in fewer bytes."""
