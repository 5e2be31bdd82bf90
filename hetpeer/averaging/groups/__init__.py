"""Who averages with whom, and when, in runs of clusters."""
