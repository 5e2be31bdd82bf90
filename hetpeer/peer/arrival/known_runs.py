"""Where this machine found the runs that it took part in: the addresses that it was given, and those of peers seen lately.

Kept in its home, for the next time and for `hetpeer status`. It is a memory and no promise: a wrong entry costs a dial, a
damaged file counts as none and is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from hetpeer.bootstrap.run.durable_files import atomic_write
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.addresses import Address, parse_address
from hetpeer.dht.kademlia.adverts import Advert
from hetpeer.dht.reach.reachability import ReachKind
from hetpeer.peer.arrival.invites import MAX_ADDRESSES, Destination, worth_giving

FILE = "peers.json"
MAX_RUNS = 8
MAX_SEEN = 8
"""Peers of a run."""
MAX_PLACES = 2
"""Addresses of one of them."""
MAX_BYTES = 1 << 20

_log = logging.getLogger(__name__)


def _sound(text: str) -> str:
    try:
        return parse_address(text).text
    except LocalError as error:
        raise ValueError(error.why) from error


Place = Annotated[str, AfterValidator(_sound)]


class KnownRun(BaseModel):
    """How a run was found."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    named: Annotated[tuple[Place, ...], Field(max_length=MAX_ADDRESSES)]
    """Addresses that its user gave."""
    seen: Annotated[tuple[Place, ...], Field(max_length=MAX_SEEN * MAX_PLACES)] = ()
    """Those of peers, the most useful first."""

    @property
    def destination(self) -> Destination:
        """Back to it, by all that is known."""
        places = dict.fromkeys((*self.named, *self.seen))
        return Destination(tuple(map(parse_address, places)), self.run)


class _Book(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    runs: Annotated[tuple[KnownRun, ...], Field(max_length=MAX_RUNS)] = ()
    """The one joined last comes first."""


def known_run(home: Path, goal: Destination) -> KnownRun | None:
    """What is known of the run that `goal` leads to; of one without an id, of the last that was found at one of its addresses."""
    places = set(map(str, goal.addresses))
    for known in _read(home).runs:
        if known.run == goal.run if goal.run else not places.isdisjoint(known.named):
            return known
    return None


def remember(home: Path, run: str, named: Iterable[Address]) -> None:
    """We are in `run`, after its user named these addresses; none: those named before stay. Raises `LocalError` HP-DISK-*."""
    runs = _read(home).runs
    before = next((known for known in runs if known.run == run), KnownRun(run=run, named=()))
    given = tuple(map(str, named))[:MAX_ADDRESSES]
    entry = before.model_copy(update={"named": given or before.named})
    _write(home, _Book(runs=(entry, *(known for known in runs if known.run != run))[:MAX_RUNS]))


def remember_seen(home: Path, run: str, seen: Sequence[Address]) -> None:
    """These peers of a run that is known are there; who was seen before is kept after them. Raises `LocalError` HP-DISK-*."""
    runs = _read(home).runs
    before = next((known for known in runs if known.run == run), None)
    if before is None:
        return
    fresh = {address.peer_id for address in seen}
    kept = (text for text in before.seen if parse_address(text).peer_id not in fresh)
    places = tuple(dict.fromkeys((*map(str, seen), *kept)))[: MAX_SEEN * MAX_PLACES]
    if places != before.seen:
        now = before.model_copy(update={"seen": places})
        _write(home, _Book(runs=tuple(now if known is before else known for known in runs)))


def acquaintances(adverts: Mapping[str, Advert], reliable: Collection[str]) -> list[Address]:
    """Whom to remember of those who advertise: the `reliable` peers, then those who take connections, then others."""

    def rank(peer: str) -> int:
        return 0 if peer in reliable else 1 if adverts[peer].reach == ReachKind.PUBLIC else 2

    found: list[Address] = []
    for peer in sorted(adverts, key=rank)[:MAX_SEEN]:
        found += worth_giving(advertised_places(peer, adverts[peer]))[:MAX_PLACES]
    return found


def advertised_places(peer: str, advert: Advert) -> list[Address]:
    """Where `peer` says that it is. Others' addresses, and what is none, are left out."""
    found = []
    for text in advert.addresses:
        try:
            address = parse_address(text)
        except LocalError:
            continue
        if address.peer_id == peer:
            found.append(address)
    return found


def back_to(home: Path, run: str = "") -> Destination:
    """Back to `run`, or to the run joined last. Raises `LocalError` HP-ADDR-002 if it never was joined."""
    for known in _read(home).runs:
        if run in ("", known.run):
            return known.destination
    raise LocalError(
        "HP-ADDR-002",
        "no run is known here",
        why=f"nobody has joined {f'run {run}' if run else 'a run'} from {home} yet",
        fix="give an invite (hetpeer://…) or an address (--bootstrap ADDR); for a run served on this machine --home DIR; hetpeer"
        " join --lan searches the local network",
        exit_code=ExitCode.USAGE,
    )


def _read(home: Path) -> _Book:
    try:
        with (home / FILE).open("rb") as file:
            return _Book.model_validate_json(file.read(MAX_BYTES))
    except FileNotFoundError:
        pass
    except (OSError, ValidationError) as error:
        _log.info("%s is not sound, and counts as none: %s", home / FILE, str(error).splitlines()[0])
    return _Book()


def _write(home: Path, book: _Book) -> None:
    atomic_write(home / FILE, book.model_dump_json().encode(), mode=0o600)
