"""Volunteers' logs at a coordinator: one file of signed lines per volunteer, of bounded size.

The coordinator cannot tell whether a line is true; the audit judges that. It knows who could write it: the
volunteers in a step's roster (rosters.py). Each of them may send as many bytes as its blocks in its steps can
need; other lines are not kept. All logs together take a share of the disk that leaves room for the
coordinator's log and for checkpoints (evidence_room.py). Docs: SECURITY.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from pydantic import ValidationError

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.log.evidence import AppliedEvent, Event, read_record
from hetpeer.bootstrap.log.evidence_room import EvidenceRoom
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.rosters import Rosters
from hetpeer.bootstrap.log.volunteer_log import keep_event, last_event, read_event
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.dht.base.errors import LocalError, ProtocolError
from hetpeer.dht.streams.abuse import Offence, OffenceError

LINE_BYTES, SLOT_BYTES = 1 << 10, 1 << 7
"""Upper bounds in bytes: of a line, and of each slot or id that it names."""
AT_FIRST = 1 << 18
"""Bytes that a volunteer with a place may send beside committed steps: about abandoned ones."""
REMEMBERED = 1 << 13
"""Digests that are kept of all volunteers' lines (at least half) to spot repeats after a reconnect."""
BEGUN = 8
"""Steps that a volunteer was told to begin last: it may report leftovers before they are decided."""
FILES = 1 << 10
"""Number of volunteers whose file path is cached, by last use."""


class VolunteerLogs:
    """Volunteers' logs in `folder`. `records` are the decisions so far; pass later ones to `recorded`.

    `keep` and `last` may run in another thread than the rest, one of them at a time.
    """

    def __init__(self, folder: Path, run_id: str, manifest: Manifest, records: Iterable[Record]) -> None:
        self._run_id = run_id
        self._microbatches = manifest.training.microbatches
        self._rosters = Rosters(len(manifest.blocks))
        self._begun: dict[str, deque[tuple[int, int, int]]] = {}
        """Volunteer → cluster, view and step of the last steps that it was told to begin."""
        self._room: Counter[str] = Counter()
        """Volunteer → bytes that it may have sent about decided steps."""
        self._disk = EvidenceRoom(folder)
        self._here: set[bytes] = set()
        """Digests of recent lines, in two generations."""
        self._before: set[bytes] = set()
        self._of = lru_cache(FILES)(lambda peer: folder / f"{peer}.jsonl")
        """Volunteer → its file, cached: Python would intern the parts of a new path for each line."""
        for record in records:
            self.recorded(record)

    def recorded(self, record: Record) -> None:
        """Raise the limits of a decision's roster: twice its update lines, so that leftovers fit, too."""
        slots = max(self._microbatches, len(record.get("clusters", ())))
        for peer, blocks in self._rosters.add(record):
            self._room[peer] += 2 * blocks * (LINE_BYTES + slots * SLOT_BYTES)

    def began(self, peer: str, begin: m.Begin) -> None:
        """Note that `peer` is told to begin a step: it may report leftovers before the step is decided."""
        steps = self._begun.setdefault(peer, deque(maxlen=BEGUN))
        steps.append((begin.line.cluster, begin.line.view, begin.step))

    def listens_to(self, peer: str) -> bool:
        """Whether `peer` ever had a place, so that lines of it can be kept."""
        return peer in self._rosters or peer in self._begun

    @property
    def has_room(self) -> bool:
        """Whether the disk has room for another line."""
        return self._disk.has(1 << 20)

    def last(self, peer: str) -> str:
        """Last stored line of `peer`, or an empty text."""
        return last_event(self._of(peer), peer)

    def keep(self, peer: str, line: str) -> bool:
        """Store a line of `peer`, unless it is stored already or belongs to no step of this volunteer.

        Returns False if the disk has no room. Raises `ProtocolError` for an invalid line or one over the
        limit, `LocalError` HP-DISK-001.
        """
        event = self._read(peer, line)
        if event is None or not self._may_say(peer, event):
            return True
        said = _digest(peer, event)
        if said in self._here or said in self._before:
            return True
        path = self._of(peer)
        if (path.stat().st_size if path.exists() else 0) + len(line) >= self._room[peer] + AT_FIRST:
            raise OffenceError(Offence.FLOOD, "more evidence than there can be", peer=peer)
        if not self._disk.has(len(line)):
            return False
        try:
            keep_event(path, line)
        except LocalError as error:
            if error.code == "HP-DISK-002":
                return False
            raise
        self._disk.took(len(line) + 1)
        self._here.add(said)
        if len(self._here) >= REMEMBERED // 2:
            self._here, self._before = set(), self._here
        return True

    def _read(self, peer: str, line: str) -> Event | None:
        """The event in a line; None for a kind that this version does not know. Raises `ProtocolError`."""
        signer, record = read_event(line)
        if signer != peer:
            raise ProtocolError("an event signed by somebody else", peer=peer)
        try:
            return read_record(signer, record, peer, self._run_id)
        except ValidationError as error:
            raise ProtocolError("an event that is none", peer=peer, why=str(error)[:500]) from None

    def _may_say(self, peer: str, event: Event) -> bool:
        """Whether `peer` was in the roster of the step that `event` is about, and held its block."""
        if isinstance(event, AppliedEvent):
            return self._rosters.had(peer, event.cluster, event.view, event.step, event.block)
        begun = (event.cluster, event.view, event.step) in self._begun.get(peer, ())
        return begun or self._rosters.had(peer, event.cluster, event.view, event.step)


def _digest(peer: str, event: Event) -> bytes:
    """Digest of an event's subject: a volunteer states an update of a block once per incarnation."""
    about = (event.incarnation, event.key) if isinstance(event, AppliedEvent) else event
    return blake2b(f"{peer} {about!r}".encode(), digest_size=16).digest()
