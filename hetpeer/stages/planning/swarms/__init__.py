"""Placement of unequal devices: pipelines of uneven stages."""
