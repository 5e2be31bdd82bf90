"""How a volunteer's owner talks to its daemon: lines of JSON over a Unix socket in its home (docs/daemon.md)."""
