"""Commands of who contributes a machine: join, pause, config, doctor, service."""
