"""Was every microbatch counted exactly once? And the run trained again on one machine."""
