"""Who does which blocks, of devices that differ: pipelines of uneven stages."""
