"""The invite to a run in its directory: made by the reliable peer that serves it, shown by `hetpeer
invite`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from hetpeer.bootstrap.run.durable_files import atomic_write
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.addresses import Address, parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node
from hetpeer.peer.arrival.destinations import SHOWN, Invite, make_invite, parse_invite, worth_giving

LOOK_S = 3.0
_HOST_PORT = re.compile(r"(?:\[([0-9a-fA-F:]+)\]|([^\s/:\[\]]+)):(\d{1,5})")
"""A host, or an address of IPv6 in brackets, and a port."""

_log = logging.getLogger(__name__)


def new_invite(run: RunDirectory, own: Iterable[Address], others: Sequence[Address]) -> Invite:
    """Invite to `run`, served at `own` and at the addresses that its author named; `others`: more peers."""
    return make_invite(run.manifest.name, run.run_id, [*named_addresses(run), *worth_giving(own), *others])


def named_addresses(run: RunDirectory) -> list[Address]:
    """Addresses that the author has named; unreadable ones are left out."""
    try:
        return [parse_address(line) for line in run.named_path.read_text().splitlines()]
    except (OSError, ValueError, LocalError):
        return []


def name_addresses(run: RunDirectory, addresses: Sequence[Address]) -> None:
    """Replace the named addresses by these. Raises `LocalError` HP-DISK-*."""
    forgotten = set(named_addresses(run)) - set(addresses)
    atomic_write(run.named_path, "".join(f"{address}\n" for address in addresses).encode())
    with contextlib.suppress(OSError, LocalError):
        invite = parse_invite(run.invite_path.read_text(errors="replace"))
        keep(run, replace(invite, addresses=tuple(a for a in invite.addresses if a not in forgotten)))


def own_address(text: str, run: RunDirectory) -> Address:
    """Address of the peer that serves `run`, from `203.0.113.7:31330`, `example.org:31330`, or one without
    the peer's id.

    Raises `LocalError` HP-ADDR-001.
    """
    text = text.strip()
    if found := _HOST_PORT.fullmatch(text):
        host, port = found[1] or found[2], found[3]
        text = f"/{_kind(host)}/{host}/tcp/{port}"
    elif not text.startswith("/"):
        raise LocalError(
            "HP-ADDR-001",
            f"{text[:SHOWN]!r} is not an address of this run",
            why="it has no host and port",
            fix="give HOST:PORT, like 203.0.113.7:31330 or example.org:31330",
            exit_code=ExitCode.USAGE,
        )
    if text.startswith("/") and "/p2p/" not in text and run.identity_path.exists():
        text = f"{text}/p2p/{Identity.load(run.identity_path).peer_id}"
    return parse_address(text)


def _kind(host: str) -> str:
    try:
        return f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        return "dns"


def keep(run: RunDirectory, invite: Invite) -> Invite:
    """Write `invite` into the run directory. Raises `LocalError` HP-DISK-*."""
    atomic_write(run.invite_path, f"{invite}\n".encode())
    return invite


class Inviting:
    """The invite to `run`, which `node` serves: renewed when another address of the node is learned, as
    behind a router, or the `members` change whose addresses it carries.

    `others` as in `new_invite`.
    """

    def __init__(
        self,
        node: Node,
        run: RunDirectory,
        others: Sequence[Address],
        members: Callable[[], Sequence[Address]] = tuple,
    ) -> None:
        self._node = node
        self._run = run
        self._others = others
        self._members = members
        self._kept: Invite | None = None

    def renewed(self) -> Invite | None:
        """The invite with the node's present addresses, kept; None if it is the same. Raises as `keep`."""
        invite = self._made()
        if invite is None or invite == self._kept:
            return None
        self._kept = keep(self._run, invite)
        return invite

    async def renew_forever(self, told: Callable[[Invite], None]) -> None:
        """Tell each new invite that is the same at two looks in a row. Never returns.

        One in which only members are others is kept, and not told: `hetpeer invite` shows it.
        """
        before = self._kept
        while True:
            await asyncio.sleep(LOOK_S)
            now, kept = self._made(), self._kept
            try:
                if now == before and (new := self.renewed()) is not None and self.tells(new, kept):
                    told(new)
            except (LocalError, OSError) as error:  # OSError: nobody reads what we print any more
                _log.warning("the invite in %s could not be renewed: %s", self._run.path, error)
            before = now

    def _made(self) -> Invite | None:
        """The invite with the present addresses; None while p2pd restarts."""
        own, others = self._node.addresses(), (*self._others, *self._members())
        return new_invite(self._run, map(parse_address, own), others) if own else None

    def tells(self, new: Invite, before: Invite | None) -> bool:
        """Whether `new` has other news than members: a line that people should see."""
        return before is None or self._without_members(new) != self._without_members(before)

    def _without_members(self, invite: Invite) -> list[Address]:
        """Its addresses of this peer, and those that its author and owner named."""
        named = {*named_addresses(self._run), *self._others}
        return [a for a in invite.addresses if a in named or a.peer_id == self._node.peer_id]


def carried_members(run: RunDirectory, peer_id: str, others: Sequence[Address]) -> list[Address]:
    """The members' addresses in the last invite, which the peer `peer_id` made; empty if there is none."""
    try:
        invite = parse_invite(run.invite_path.read_text(errors="replace"))
    except (OSError, LocalError):
        return []
    named = {*named_addresses(run), *others}
    return [a for a in invite.addresses if a not in named and a.peer_id != peer_id]


def kept_invite(run: RunDirectory, more: Sequence[Address], voucher: bytes = b"") -> Invite:
    """The last invite, with `more` addresses first and with `voucher`.

    Raises `LocalError` HP-RUN-017 if there is neither an invite nor an address.
    """
    kept: tuple[Address, ...] = ()
    why = ""
    try:
        invite = parse_invite(run.invite_path.read_text(errors="replace"))
        if invite.run == run.run_id:
            kept = invite.addresses
        else:
            why = "it was another run when it was served last"
    except OSError:
        why = "it was not served from here yet"
    except LocalError as error:
        why = f"{run.invite_path}: {error.why}"
    if not kept and not more:
        raise LocalError(
            "HP-RUN-017",
            f"no address is known for an invite to {run.path}",
            why=why,
            fix=f"start hetpeer bootstrap {run.path}, or give an address: hetpeer invite {run.path} "
            "--bootstrap ADDR",
            exit_code=ExitCode.CONFIG,
        )
    return make_invite(run.manifest.name, run.run_id, [*more, *kept], voucher)
