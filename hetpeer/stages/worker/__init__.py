"""The compute worker process: blocks at work behind a sandbox."""
