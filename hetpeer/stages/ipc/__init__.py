"""Commands and answers between the daemon and its compute worker, and their shared memory."""
