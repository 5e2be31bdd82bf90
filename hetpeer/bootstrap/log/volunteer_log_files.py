"""What the volunteers of a run have said so far, at a coordinator: a file of signed lines for each, of bounded size.

Nobody but its writer can tell whether a line is true, and the audit reads what is here. But there are so many lines that a volunteer can
have to say: one for each block of each committed step, and a few on what it was led to. Docs: SECURITY.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from pydantic import ValidationError

from hetpeer.bootstrap.log.evidence import AppliedEvent, read_record
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.logged_decision import decisions_of
from hetpeer.bootstrap.log.volunteer_log import keep_event, last_event, read_event
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.strikes import Offence, OffenceError

LINE_BYTES, SLOT_BYTES = 1 << 10, 1 << 7
"""A line takes less than the first, and the second for each slot or id that it names."""
AT_FIRST = 1 << 18
"""Bytes that a volunteer may have said of no committed step: of steps that came to nothing."""
REMEMBERED = 1 << 13
"""Lines, of all volunteers, that are known to be here already, half of them at least: who begins a session anew may say the last ones again."""

FILES = 1 << 10
"""Volunteers whose file's path is kept, those that said something last."""


class VolunteerLogs:
    """The files in `folder`. `records`: what is decided so far; `recorded` tells what is decided later."""

    def __init__(self, folder: Path, run_id: str, manifest: Manifest, records: Iterable[Record]) -> None:
        self._run_id = run_id
        self._blocks, self._microbatches = len(manifest.blocks), manifest.training.microbatches
        self._room = AT_FIRST
        self._here: set[bytes] = set()
        """Digests of what was said lately, and of what was before that: a few bytes for each of ever so many lines."""
        self._before: set[bytes] = set()
        self._of = lru_cache(FILES)(lambda peer: folder / f"{peer}.jsonl")
        """Volunteer → its file. The parts of a path are interned: with new ones for every line the interpreter's table of such names would fill up with old ones."""
        for record in records:
            self.recorded(record)

    def recorded(self, record: Record) -> None:
        """Of what is decided volunteers have something to say: twice what the lines on updates take, the rest is for leftovers."""
        for one in decisions_of(record):
            slots = max(self._microbatches, len(one.clusters))
            self._room += 2 * self._blocks * (LINE_BYTES + slots * SLOT_BYTES)

    def last(self, peer: str) -> str:
        """The last line of `peer` that is here, or nothing."""
        return last_event(self._of(peer), peer)

    def keep(self, peer: str, line: str) -> None:
        """Add what `peer` has sent, unless it is here. Lines of a kind that we do not know are kept as they are.

        Raises `ProtocolError` for what the audit would not read, or for more than there can be to say, and `LocalError` HP-DISK-002 with the file as it was.
        """
        said = self._said(peer, line)
        if said in self._here or said in self._before:
            return
        path = self._of(peer)
        if (path.stat().st_size if path.exists() else 0) + len(line) >= self._room:
            raise OffenceError(Offence.FLOOD, "more evidence than there can be", peer=peer)
        keep_event(path, line)
        self._here.add(said)
        if len(self._here) >= REMEMBERED // 2:
            self._here, self._before = set(), self._here

    def _said(self, peer: str, line: str) -> bytes:
        """A digest of what a line is about: an update of a block is told once in a life."""
        signer, record = read_event(line)
        if signer != peer:
            raise ProtocolError("an event signed by somebody else", peer=peer)
        try:
            event = read_record(signer, record, peer, self._run_id)
        except ValidationError as error:
            raise ProtocolError("an event that is none", peer=peer, why=str(error)[:500]) from None
        about = repr((event.incarnation, event.key)) if isinstance(event, AppliedEvent) else line
        return blake2b(f"{peer} {about}".encode(), digest_size=16).digest()
