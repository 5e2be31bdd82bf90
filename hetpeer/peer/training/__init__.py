"""A volunteer at work: the member core driven by links, the compute worker and the disk."""
