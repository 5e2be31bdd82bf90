"""`hetpeer top`: watch this machine's volunteer live."""

from __future__ import annotations

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.cli.options import HomeOption


def top(*, home: HomeOption = None) -> None:
    """Watch this machine's volunteer live.

    State, speed and links. Keys: q quits, p pauses, r resumes.
    """
    try:
        from hetpeer.peer.top.top_screen import Top
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise LocalError(
            "HP-SYS-005",
            "hetpeer top is not installed",
            why="it needs the package textual, which no other command does",
            fix="pip install 'hetpeer[top]', or use hetpeer status --watch",
            exit_code=ExitCode.CONFIG,
        ) from error

    from hetpeer.peer.control.control_client import ask
    from hetpeer.peer.control.control_messages import ControlRequest
    from hetpeer.peer.process.home import default_home

    place = home or default_home()
    ask(place, ControlRequest(do="status"))  # that nobody is there is said here, and not on a screen
    Top(place).run()
