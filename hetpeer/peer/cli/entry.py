"""The console script `hetpeer`: Ctrl-C ends it without a traceback also while it imports its modules."""

from __future__ import annotations

import signal


def run() -> None:
    """Import the command line and run it; always ends in SystemExit, or by SIGINT while it imports."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hetpeer.peer.cli.main import run as run_command

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command()


if __name__ == "__main__":
    run()
