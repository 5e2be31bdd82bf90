"""Conversion of the author's torch module to blocks. Runs on the author's machine only."""
