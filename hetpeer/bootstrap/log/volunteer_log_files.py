"""Volunteers' logs at a coordinator: one file of signed lines per volunteer, of bounded size.

The coordinator cannot tell whether a line is true; the audit judges that. But the number of legitimate lines
is bounded: one per block of each committed step, and a few about leftovers. Docs: SECURITY.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from pydantic import ValidationError

from hetpeer.bootstrap.log.evidence import AppliedEvent, read_record
from hetpeer.bootstrap.log.history import Record, decisions_of
from hetpeer.bootstrap.log.volunteer_log import keep_event, last_event, read_event
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.streams.abuse import Offence, OffenceError

LINE_BYTES, SLOT_BYTES = 1 << 10, 1 << 7
"""Upper bounds in bytes: of a line, and of each slot or id that it names."""
AT_FIRST = 1 << 18
"""Bytes that a volunteer may send beside committed steps: about abandoned steps."""
REMEMBERED = 1 << 13
"""Digests that are kept of all volunteers' lines (at least half) to spot repeats after a reconnect."""

FILES = 1 << 10
"""Number of volunteers whose file path is cached, by last use."""


class VolunteerLogs:
    """Volunteers' logs in `folder`. `records` are the decisions so far; pass later ones to `recorded`."""

    def __init__(self, folder: Path, run_id: str, manifest: Manifest, records: Iterable[Record]) -> None:
        self._run_id = run_id
        self._blocks, self._microbatches = len(manifest.blocks), manifest.training.microbatches
        self._room = AT_FIRST
        self._here: set[bytes] = set()
        """Digests of recent lines, in two generations."""
        self._before: set[bytes] = set()
        self._of = lru_cache(FILES)(lambda peer: folder / f"{peer}.jsonl")
        """Volunteer → its file, cached: Python would intern the parts of a new path for each line."""
        for record in records:
            self.recorded(record)

    def recorded(self, record: Record) -> None:
        """Raise the limit for a new decision: twice the size of its update lines, the rest for leftovers."""
        for one in decisions_of(record):
            slots = max(self._microbatches, len(one.clusters))
            self._room += 2 * self._blocks * (LINE_BYTES + slots * SLOT_BYTES)

    def last(self, peer: str) -> str:
        """Last stored line of `peer`, or an empty text."""
        return last_event(self._of(peer), peer)

    def keep(self, peer: str, line: str) -> None:
        """Store a line of `peer` unless it is stored already; lines of an unknown kind are stored unchanged.

        Raises `ProtocolError` for an invalid line or one over the limit, `LocalError` HP-DISK-002.
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
        """Digest of a line's subject: a volunteer states an update of a block once per incarnation."""
        signer, record = read_event(line)
        if signer != peer:
            raise ProtocolError("an event signed by somebody else", peer=peer)
        try:
            event = read_record(signer, record, peer, self._run_id)
        except ValidationError as error:
            raise ProtocolError("an event that is none", peer=peer, why=str(error)[:500]) from None
        about = repr((event.incarnation, event.key)) if isinstance(event, AppliedEvent) else line
        return blake2b(f"{peer} {about}".encode(), digest_size=16).digest()
