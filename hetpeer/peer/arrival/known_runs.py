"""Addresses of runs that this machine took part in: those that its user gave, and those of peers seen lately.

Kept in the home for the next join and for `hetpeer status`. A wrong entry costs one dial; a damaged file
counts as empty and is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from hetpeer.bootstrap.run.durable_files import atomic_write
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.addresses import Address, parse_address
from hetpeer.peer.arrival.invites import MAX_ADDRESSES, Destination

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
    """Addresses of a known run."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    named: Annotated[tuple[Place, ...], Field(max_length=MAX_ADDRESSES)]
    """Addresses that its user gave."""
    seen: Annotated[tuple[Place, ...], Field(max_length=MAX_SEEN * MAX_PLACES)] = ()
    """Addresses of peers, the most useful first."""

    @property
    def destination(self) -> Destination:
        """Back to it, by all that is known."""
        places = dict.fromkeys((*self.named, *self.seen))
        return Destination(tuple(map(parse_address, places)), self.run)


class _Book(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    runs: Annotated[tuple[KnownRun, ...], Field(max_length=MAX_RUNS)] = ()
    """Runs, the last one joined first."""


def known_run(home: Path, goal: Destination) -> KnownRun | None:
    """The known run of `goal`; without an id, the last one found at one of its addresses; else None."""
    places = set(map(str, goal.addresses))
    for known in _read(home).runs:
        if known.run == goal.run if goal.run else not places.isdisjoint(known.named):
            return known
    return None


def remember(home: Path, run: str, named: Iterable[Address]) -> None:
    """Note `run` as joined last; `named` replaces old addresses if given. Raises `LocalError` HP-DISK-*."""
    runs = _read(home).runs
    before = next((known for known in runs if known.run == run), KnownRun(run=run, named=()))
    given = tuple(map(str, named))[:MAX_ADDRESSES]
    entry = before.model_copy(update={"named": given or before.named})
    _write(home, _Book(runs=(entry, *(known for known in runs if known.run != run))[:MAX_RUNS]))


def remember_seen(home: Path, run: str, seen: Sequence[Address]) -> None:
    """Note addresses of a known run's present peers before earlier ones. Raises `LocalError` HP-DISK-*."""
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


def back_to(home: Path, run: str = "") -> Destination:
    """Back to `run`, or to the run joined last. Raises `LocalError` HP-ADDR-002 if it never was joined."""
    for known in _read(home).runs:
        if run in ("", known.run):
            return known.destination
    raise LocalError(
        "HP-ADDR-002",
        "no run is known here",
        why=f"nobody has joined {f'run {run}' if run else 'a run'} from {home} yet",
        fix="give an invite (hetpeer://…) or an address (--bootstrap ADDR); for a run served on this machine "
        "--home DIR; hetpeer"
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
        _log.info("%s is damaged and ignored: %s", home / FILE, str(error).splitlines()[0])
    return _Book()


def _write(home: Path, book: _Book) -> None:
    atomic_write(home / FILE, book.model_dump_json().encode(), mode=0o600)
