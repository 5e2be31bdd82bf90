"""Places where a process can be made to die, so that tests cover every gap between two effects.

`HETPEER_FAIL=NAME:N` kills the process (SIGKILL) when the place NAME is reached for the N-th time. Several
entries are separated by commas. `NAME:N@FILE` kills only one of the processes that share FILE: the first to
get there creates the file. A place is passed before the action it is named after: `tell_vote`,
`apply_update`, `record_commit`, `send_plan`. The names are those of effects and messages (docs/protocol.md
has the table; places within an averaging begin with `average_`, those of the worker with `worker_`). A
process without the variable pays for one look at `armed`, which callers with many effects take first.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from hetpeer.dht.base.errors import ExitCode, LocalError

VARIABLE = "HETPEER_FAIL"

armed: dict[str, int] = {}
"""Place → how many more times it may be passed."""
_tokens: dict[str, Path] = {}
"""Place → file that the first process to die there creates."""


def arm(text: str) -> None:
    """Die where `text` (`NAME:N[@FILE],…`) says. Raises `LocalError` HP-CONF-002 for other texts."""
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
        armed[found[1]] = int(found[2])
        if found[3]:
            _tokens[found[1]] = Path(found[3])


def reached(place: str) -> None:
    """Pass `place`; die if it is armed and this is the N-th time."""
    if place in armed:
        armed[place] -= 1
        if not armed[place] and _is_ours(place):
            os.kill(os.getpid(), signal.SIGKILL)


def _is_ours(place: str) -> bool:
    """Whether no other process has died there yet."""
    token = _tokens.get(place)
    if token is not None:
        try:
            token.touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def before(thing: object, prefix: str = "") -> None:
    """Pass the place named after `thing`, an effect: the class `RunForward` is the place `run_forward`."""
    reached(prefix + re.sub(r"(?<!^)(?=[A-Z])", "_", type(thing).__name__).lower())
