"""Checkpoints, their copies, and the service that hands out files and states."""
