"""Admission of volunteers to a run."""
