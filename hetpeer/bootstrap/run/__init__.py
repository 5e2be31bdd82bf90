"""Definition of a run: manifest, settings, amendments, the run directory."""
