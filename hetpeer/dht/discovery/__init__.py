"""Who takes part in a run, and what work is left over: rosters and the task board."""
