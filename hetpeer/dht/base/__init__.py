"""What everything stands on: clock, errors, tasks with an owner, reading untrusted bytes."""
