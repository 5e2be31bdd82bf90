"""The ground layer: clock, errors, tasks with an owner, checks of untrusted bytes."""
