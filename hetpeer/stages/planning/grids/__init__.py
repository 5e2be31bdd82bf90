"""Placement of devices in a grid of equal stages and pipelines, as in DT-FM."""
