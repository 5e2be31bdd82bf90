"""Stand-ins for functions of torch and of libraries while a model is traced, and nowhere else."""
