"""Volunteers' lines on their way to the coordinator's disk, beside its event loop.

One thread checks and writes them: a line of each volunteer in turn, in order for each. A volunteer with more
than BACKLOG bytes of waiting lines is not read until they are fewer, and so sends no more; nobody else
waits. A line for which the disk has no room is dropped, and so are all later ones of this volunteer. Once
there is room, the volunteer is asked for what follows the last line here; the dropped line is then the
next one that counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field

from hetpeer.bootstrap.log.volunteer_log_files import VolunteerLogs
from hetpeer.dht.base.errors import LocalError, ProtocolError, short_id
from hetpeer.dht.base.runtime import to_its_end

BACKLOG = 1 << 18
"""Bytes of a volunteer's lines that may wait, beside the one that exceeds them."""
AT_ONCE = 64
"""Lines that the thread takes at a time."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    """A volunteer's lines that wait; `error`: of an earlier one, not yet reported."""

    lines: deque[str] = field(default_factory=deque)
    nbytes: int = 0
    error: ProtocolError | None = None
    shorter: asyncio.Event = field(default_factory=asyncio.Event)


class EvidenceKeeper:
    """The lines of all volunteers of a term, on their way into `logs`; `run` writes them."""

    def __init__(self, logs: VolunteerLogs) -> None:
        self._logs = logs
        self._waiting: dict[str, _Waiting] = {}
        self._any = asyncio.Event()
        self._idle = asyncio.Event()
        self._working = asyncio.Lock()
        self._dropped: dict[str, str] = {}
        """Volunteer → the first of its lines for which there was no room, if it has not sent it again."""

    async def put(self, peer: str, line: str) -> None:
        """Queue a line of `peer`; returns when the next may come.

        Raises the `ProtocolError` that an earlier line of `peer` has caused.
        """
        if not self._logs.listens_to(peer):
            return
        waiting = self._waiting.setdefault(peer, _Waiting())
        while waiting.nbytes >= BACKLOG:
            waiting.shorter.clear()
            await waiting.shorter.wait()
        if (error := waiting.error) is not None:
            waiting.error = None
            raise error
        waiting.lines.append(line)
        waiting.nbytes += len(line)
        self._idle.clear()
        self._any.set()

    async def last(self, peer: str, *, again: bool) -> str:
        """Last line of `peer` on the disk, once those that wait are there; `again`: within its session."""
        waiting = self._waiting.setdefault(peer, _Waiting())
        while waiting.lines:
            waiting.shorter.clear()
            await waiting.shorter.wait()
        async with self._working:
            if not again:
                self._dropped.pop(peer, None)
            return await to_its_end(self._logs.last, peer)

    async def idle(self) -> None:
        """Return when no line waits."""
        self._any.set()
        await self._idle.wait()

    def to_ask(self) -> list[str]:
        """Volunteers whose lines were dropped, if there is room now: they are to be asked again."""
        return sorted(self._dropped) if self._dropped and self._logs.has_room else []

    async def run(self) -> None:
        """Write lines for ever. Raises `LocalError` HP-DISK-001 if a log cannot be written at all."""
        while True:
            await self._any.wait()
            async with self._working:
                lines = self._next()
                if not lines:
                    self._any.clear()
                    self._idle.set()
                    continue
                before = bool(self._dropped)
                errors = await to_its_end(self._keep, lines)
            if self._dropped and not before:
                _log.warning("%s", _no_room().line())
            for peer, line in lines:
                waiting = self._waiting[peer]
                waiting.lines.popleft()
                waiting.nbytes -= len(line)
                waiting.error = errors.get(peer, waiting.error)
                waiting.shorter.set()

    def _next(self) -> list[tuple[str, str]]:
        """Up to AT_ONCE lines, the first of each volunteer, then the second of each, and so on."""
        rows = [(peer, list(waiting.lines)[:AT_ONCE]) for peer, waiting in self._waiting.items()]
        ordered = [
            (peer, lines[place])
            for place in range(max((len(lines) for _, lines in rows), default=0))
            for peer, lines in rows
            if place < len(lines)
        ]
        return ordered[:AT_ONCE]

    def _keep(self, lines: list[tuple[str, str]]) -> dict[str, ProtocolError]:
        """Keep `lines`; returns the offences, by volunteer. Runs in a thread, alone."""
        errors: dict[str, ProtocolError] = {}
        for peer, line in lines:
            if self._dropped.get(peer, line) != line:
                continue
            try:
                if self._logs.keep(peer, line):
                    self._dropped.pop(peer, None)
                else:
                    self._dropped[peer] = line
            except ProtocolError as error:
                _log.debug("a line of %s is not kept: %s", short_id(peer), error.what)
                errors[peer] = error
        return errors


def _no_room() -> LocalError:
    return LocalError(
        "HP-DISK-006",
        "volunteers' signed lines are not kept for the time being",
        why="they take a quarter of the space that they and the rest of the disk have, and leave a gigabyte "
        "for the log and checkpoints",
        fix="free some space; volunteers then send again what is missing, and until then hetpeer audit "
        "may miss lines here",
    )
