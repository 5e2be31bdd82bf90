"""Places where a process can be made to die, so that every gap between two effects of the protocol can be tested.

`HETPEER_FAIL=NAME:N` kills the process (SIGKILL) when the place NAME is reached for the N-th time; several are separated by
commas. With `NAME:N@FILE` only one process dies of all that have the same FILE: the first to get there, which makes it. A place is passed before what it is named after is done: `tell_vote`, `apply_update`, `record_commit`, `send_plan`. Names are
those of effects and messages (docs/protocol.md has the table; in an averaging `average_send_part`), and nothing is asked of a process that was not told to fail.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from hetpeer.dht.base.errors import ExitCode, LocalError

VARIABLE = "HETPEER_FAIL"

_left: dict[str, int] = {}
"""Place → how often it may still be passed."""
_tokens: dict[str, Path] = {}
"""Place → the file that whoever dies there makes."""


def arm(text: str) -> None:
    """Die where `text` says. Raises `LocalError` HP-CONF-002."""
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"([a-z][a-z_0-9]*):([1-9][0-9]{0,8})(?:@(.+))?", part.strip())
        if found is None:
            raise LocalError(
                "HP-CONF-002",
                f"{VARIABLE} is {text!r:.100}, which names no place to fail at",
                why="the variable is for tests, and says where this process is to die",
                fix=f"write it as {VARIABLE}=tell_vote:3, or leave it out",
                exit_code=ExitCode.CONFIG,
            )
        _left[found[1]] = int(found[2])
        if found[3]:
            _tokens[found[1]] = Path(found[3])


def reached(place: str) -> None:
    """We are at `place`."""
    if place in _left:
        _left[place] -= 1
        if not _left[place] and _is_ours(place):
            os.kill(os.getpid(), signal.SIGKILL)


def _is_ours(place: str) -> bool:
    """Whether nobody else has died there."""
    token = _tokens.get(place)
    if token is not None:
        try:
            token.touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def before(thing: object, prefix: str = "") -> None:
    """We are at the place before `thing`, an effect or a command: `RunForward` is `run_forward`."""
    if _left:
        reached(prefix + re.sub(r"(?<!^)(?=[A-Z])", "_", type(thing).__name__).lower())
