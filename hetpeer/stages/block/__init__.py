"""A block and its training state: computation, parameter groups, fingerprints, device."""
