"""Control of a daemon by its owner: lines of JSON over a Unix socket in its home (docs/daemon.md)."""
