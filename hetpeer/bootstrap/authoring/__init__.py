"""The author's side: create a run, package the model."""
