"""Virtual time and a virtual network."""
