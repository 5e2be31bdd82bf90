"""What a run is: manifest, settings, amendments, the run directory."""
