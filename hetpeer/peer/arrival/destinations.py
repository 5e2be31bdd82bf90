"""Destinations of a join: addresses of a run's peers, from invites, from the user or from earlier joins.

An invite is a link with a run's id and the addresses of some of its peers (docs/joining.md has the format).
The run id is a hash of the manifest, so the peers at the addresses cannot hand out another run.

Known runs are those that this machine took part in, each with the addresses that its user gave and those of
peers seen lately. They are kept in the home for the next join and for `hetpeer status`. A wrong entry costs
one dial; a damaged file counts as empty and is replaced.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, unquote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from hetpeer.bootstrap.run.durable_files import atomic_write
from hetpeer.bootstrap.run.vouchers import as_text, of_text
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.addresses import Address, far_first, parse_address

SCHEME = "hetpeer://"
MAX_ADDRESSES = 8
MAX_LENGTH = 2048
MAX_NAME = 64
SHOWN = 120
"""Characters of a wrong invite that an error repeats."""
MAX_SHOWN = 8
"""Runs that a line names."""
MAX_OWN = 3
"""Addresses of the peer that makes the invite: a home has one for the internet and one or two for itself."""
RUN_ID = re.compile(r"[0-9a-f]{32}")
_LINK = re.compile(r"hetpeer://([a-z0-9.-]{1,64})@([0-9a-f]{32})(/[A-Za-z0-9/.,%-]+),([0-9a-f]{6})")
_VOUCHER = "/voucher/"
_NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Invite:
    """Invite to the run with the id `run`; `name` is for people. Text: `str(invite)`."""

    name: str
    run: str
    addresses: tuple[Address, ...]
    voucher: bytes = b""
    """Voucher for a run that asks for one (bootstrap/run/vouchers.py); the link is a secret then."""

    def __str__(self) -> str:
        parts = [_safe(address.text) for address in self.addresses]
        if self.voucher:
            parts.append(f"{_VOUCHER}{as_text(self.voucher)}")
        body = f"{SCHEME}{self.name}@{self.run}{','.join(parts)}"
        return f"{body},{_check(body)}"


def make_invite(name: str, run: str, addresses: Iterable[Address], voucher: bytes = b"") -> Invite:
    """Invite to the run `name` with as many of the addresses as fit, the first ones first."""
    words = re.sub(r"[^a-z0-9.]+|\.{2,}", "-", name.lower())
    label = re.sub(r"[.-]*-[.-]*", "-", words)[:MAX_NAME].strip(".-") or "run"
    kept = tuple(dict.fromkeys(addresses))[:MAX_ADDRESSES]
    invite = Invite(label, run, kept, voucher)
    while len(str(invite)) > MAX_LENGTH and len(invite.addresses) > 1:
        invite = replace(invite, addresses=invite.addresses[:-1])
    return invite


def parse_invite(text: str) -> Invite:
    """The invite in `text`. Raises `LocalError` HP-ADDR-003 unless every character of it belongs to one."""
    text = text.strip()
    if len(text) > MAX_LENGTH:
        raise unusable(text, f"it is longer than {MAX_LENGTH} characters")
    found = _LINK.fullmatch(text)
    if found is None:
        raise unusable(text, "it is incomplete, or characters in it were changed")
    name, run, places, check = found.groups()
    if check != _check(text[: found.end(3)]):
        raise unusable(text, "its checksum is wrong: a part is missing or was changed")
    parts = places.split(",")
    voucher = parts.pop().removeprefix(_VOUCHER) if parts[-1].startswith(_VOUCHER) else ""
    if not parts:
        raise unusable(text, "it has no address")
    if len(parts) > MAX_ADDRESSES:
        raise unusable(text, f"it has more than {MAX_ADDRESSES} addresses")
    try:
        addresses = tuple(parse_address(unquote(part, errors="strict")) for part in parts)
        invite = Invite(name, run, addresses, of_text(voucher))
    except UnicodeDecodeError as error:
        raise unusable(text, "an address in it is not text") from error
    except ValueError as error:
        raise unusable(text, "the voucher in it is damaged") from error
    except LocalError as error:
        raise unusable(text, f"an address in it is wrong: {error.why}") from error
    if not _NAME.fullmatch(name) or str(invite) != text:
        raise unusable(text, "it is not written as hetpeer writes it")
    return invite


@dataclass(frozen=True, slots=True)
class Destination:
    """Goal of a join: `addresses` to try, and the id of the run; empty: any run."""

    addresses: tuple[Address, ...]
    run: str = ""
    voucher: bytes = b""
    """Voucher of an invite, for admission."""


def destination(texts: Iterable[str], run: str = "") -> Destination:
    """Destination of given addresses and invites, in order. Raises `LocalError` HP-ADDR-001, HP-ADDR-003."""
    if run and not RUN_ID.fullmatch(run):
        raise LocalError(
            "HP-ADDR-003",
            f"{run[:80]!r} is not the id of a run",
            why="a run id has 32 characters, digits and letters from a to f",
            fix="copy it from hetpeer status, or ask for an invite",
            exit_code=ExitCode.USAGE,
        )
    addresses: list[Address] = []
    voucher = b""
    for text in map(str.strip, texts):
        if not text.startswith(SCHEME):
            addresses.append(parse_address(text))
            continue
        invite = parse_invite(text)
        if run not in ("", invite.run):
            raise unusable(
                text, f"it leads to run {invite.run}, and the other invite or --run names run {run}"
            )
        run = invite.run
        addresses += invite.addresses
        voucher = invite.voucher or voucher
    return Destination(tuple(dict.fromkeys(addresses)), run, voucher)


def worth_giving(own: Iterable[Address]) -> list[Address]:
    """A peer's own addresses that others may reach, the likeliest first; loopback if it has no others."""
    places = far_first(own)
    elsewhere = [place for place in places if place.socket is not None and not is_loopback(place.socket[0])]
    return (elsewhere or places)[:MAX_OWN]


def several_runs(where: str, names: Mapping[str, str], choice: str) -> LocalError:
    """HP-ADDR-004: there are several runs `where` (id → name); `choice` is the command that chooses one."""
    return LocalError(
        "HP-ADDR-004",
        f"there are {len(names)} runs in {where}",
        why=listed_runs(names),
        fix=f"choose one: {choice}",
        exit_code=ExitCode.USAGE,
    )


def listed_runs(names: Mapping[str, str]) -> str:
    """The first MAX_SHOWN runs (id → name) with the option that chooses each."""
    shown = [f"{name or 'one without a name'} (--run {run})" for run, name in names.items()]
    more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return ", ".join(shown[:MAX_SHOWN]) + more


def unusable(text: str, why: str) -> LocalError:
    """HP-ADDR-003: the invite `text` leads nowhere."""
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    return LocalError(
        "HP-ADDR-003",
        f"{shown!r} is not an invite that can be used",
        why=why,
        fix="copy the whole line that hetpeer invite prints, from hetpeer:// to its end",
        exit_code=ExitCode.USAGE,
    )


def is_loopback(ip: str) -> bool:
    """Whether only this machine is reached at `ip`."""
    return ip.startswith("127.") or ip == "::1"


def _safe(address: str) -> str:
    """`address` without characters that a chat or a shell takes for something else; `unquote` reads it."""
    text = quote(address, safe="/")
    for mark, code in (("_", "%5F"), ("~", "%7E"), ("--", "-%2D"), ("..", ".%2E")):
        text = text.replace(mark, code)
    return text


def _check(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:6]


# ── runs that are known here ────────────────────────────────────────────────────────────────────────────────


FILE = "peers.json"
MAX_RUNS = 8
MAX_SEEN = 8
"""Peers of a run."""
MAX_PLACES = 2
"""Addresses of one of them."""
MAX_BYTES = 1 << 20


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
        "--home DIR; hetpeer join --lan searches the local network",
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
