"""Dialback: ask other peers whether they can reach us, answer them, and configure p2pd accordingly.

The protocol `hetpeer/1/dialback`: the helper opens a fresh connection to where the question came from.

    asker → helper   {"ports": [31330]}
    helper → asker   {"ip": "203.0.113.7", "relays": [...], "others": [...]}   at once
    helper → asker   {"port": 31330}                          0: at none of them; within DIAL_S + 1 s

A helper dials the IP address that the question came from: never an address in a message, and never through
a relay. It reports a port only if the asker proves its peer id there (tcp_probe.py). `relays` are reliable
peers to reserve a slot at, `others` addresses of more peers that could be asked, at most two of each; both
are claims. `DialBack` is the helper's side; `ReachProbe` drives the asker's core in reachability.py.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hetpeer.dht.base.errors import LocalError, ProtocolError, RemoteError
from hetpeer.dht.base.runtime import Clock
from hetpeer.dht.base.untrusted import printable
from hetpeer.dht.identity.address_record import AddressRecord
from hetpeer.dht.identity.addresses import (
    Address,
    at_socket,
    far_first,
    is_far,
    parse_address,
    relay_in,
    socket_in,
)
from hetpeer.dht.kademlia.network_session import NetworkSession
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, P2pdError
from hetpeer.dht.p2pd.p2pd_process import NodeConfig
from hetpeer.dht.p2pd.tcp_probe import is_peer
from hetpeer.dht.reach.reachability import (
    ROUND_S,
    Ask,
    Effect,
    Reachability,
    ReachEstimate,
    ReachFinding,
    ReachKind,
)
from hetpeer.dht.streams.abuse import DialBudget
from hetpeer.dht.streams.stream import Stream

PROTOCOL = "hetpeer/1/dialback"
DIAL_S = 3.0
MAX_PORTS = 2
MAX_HINTS = 4
ANSWER_S = 3.0

Hints = Callable[[str], Awaitable[tuple[Sequence[str], Sequence[str]]]]
"""Asking peer → (relays, other peers), as addresses."""
MEET_S = 2.5
"""Seconds to connect to a peer that a helper named, so that it can be asked in the same round."""
MAX_ADDRESSES = 2
"""Addresses of one peer in a hint."""
HINT_S = 1.0
"""Seconds that a helper has to look up addresses of its peers."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DialBackHint:
    """A helper's hints beside its finding. They are claims."""

    relays: tuple[Address, ...] = ()
    others: tuple[Address, ...] = ()


class DialBack:
    """The helper's side.

    `control` returns p2pd's client while p2pd runs, else None. `hints` are told to the asker. `loopback`:
    whether peers on this machine are dialled too.
    """

    def __init__(
        self, control: Callable[[], P2pdControl | None], clock: Clock, hints: Hints, *, loopback: bool
    ) -> None:
        self._control = control
        self._clock = clock
        self._hints = hints
        self._loopback = loopback
        self._budget = DialBudget()

    async def handle(self, stream: Stream) -> None:
        """Serve one question; passed to `Node.serve`. Raises `RemoteError`."""
        header = (await stream.receive(payload_limit=0, timeout_s=ANSWER_S)).header
        ports = read_ports(header, stream.peer_id)
        control = self._control()
        ip = None if control is None else await self._seen_at(control, stream.peer_id)
        if ip is None:
            await stream.send({"refused": "no direct connection, or not ready"}, timeout_s=ANSWER_S)
        elif not self._budget.admit(self._clock.monotonic(), stream.peer_id, ip):
            await stream.send({"refused": "asked too often"}, timeout_s=ANSWER_S)
        else:
            with self._budget.one_more():
                await self._try(stream, ip, ports)

    async def _try(self, stream: Stream, ip: str, ports: Sequence[int]) -> None:
        relays, others = await self._hints(stream.peer_id)
        said = {"ip": ip, "relays": list(relays)[:MAX_HINTS], "others": list(others)[:MAX_HINTS]}
        await stream.send(said, timeout_s=ANSWER_S)
        reached = await asyncio.gather(*(is_peer(ip, port, stream.peer_id, DIAL_S) for port in ports))
        found = [port for port, there in zip(ports, reached, strict=True) if there]
        await stream.send({"port": found[0] if found else 0}, timeout_s=ANSWER_S)

    async def _seen_at(self, control: P2pdControl, peer_id: str) -> str | None:
        """IP address of a direct connection with the peer; None if there is none that may be dialled."""
        for peer, text in await control.connections():
            place = socket_in(text)
            if peer == peer_id and place is not None and not relay_in(text) and self._may_dial(place[0]):
                return place[0]
        return None

    def _may_dial(self, ip: str) -> bool:
        address = ipaddress.ip_address(ip)
        if address.is_loopback:
            return self._loopback  # a peer behind a proxy on this machine could make us dial our own ports
        return not (address.is_multicast or address.is_unspecified or address.is_link_local)


async def ask(
    control: P2pdControl, helper: str, ports: Sequence[int], hinted: Callable[[DialBackHint], None]
) -> ReachFinding:
    """Ask `helper` to dial us at `ports`. Its hints go to `hinted` at once. Raises `RemoteError`."""
    async with await control.open_stream(helper, PROTOCOL, ANSWER_S) as stream:
        await stream.send({"ports": list(ports)[:MAX_PORTS]}, timeout_s=ANSWER_S)
        ip, hint = read_hint((await stream.receive(payload_limit=0, timeout_s=ANSWER_S)).header, helper)
        hinted(hint)
        found = (await stream.receive(payload_limit=0, timeout_s=DIAL_S + ANSWER_S)).header
    return ReachFinding(helper=helper, ip=ip, port=read_port(found, helper, ports))


def read_hint(header: Mapping[str, Any], helper: str) -> tuple[str, DialBackHint]:
    """(our address as `helper` sees it, its hints). Raises `RemoteError`: HP-NET-014 if it refuses."""
    if "refused" in header:
        raise RemoteError(
            "HP-NET-014",
            "a peer does not dial us",
            peer=helper,
            why=str(printable(str(header["refused"]))) or "it gives no reason",
            fix="nothing: others are asked, and this one again later",
        )
    ip = _ip(header.get("ip"), helper)
    return ip, DialBackHint(relays=_addresses(header.get("relays")), others=_addresses(header.get("others")))


def read_port(header: Mapping[str, Any], helper: str, ports: Sequence[int]) -> int:
    """The port of `ports` at which `helper` reached us; 0: none. Raises `ProtocolError`."""
    port = header.get("port")
    if not isinstance(port, int) or (port and port not in ports):
        raise ProtocolError("a dial-back to a port that we did not name", peer=helper)
    return port


def read_ports(header: Mapping[str, Any], peer: str) -> list[int]:
    """The ports at which `peer` wants to be dialled. Raises `ProtocolError`."""
    value = header.get("ports")
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PORTS:
        raise ProtocolError("a dial-back without ports, or with too many", peer=peer)
    if not all(isinstance(port, int) and not isinstance(port, bool) and 0 < port < 2**16 for port in value):
        raise ProtocolError("a dial-back to what is no port", peer=peer)
    return list(dict.fromkeys(value))


def _ip(value: object, peer: str) -> str:
    """An IP address without a zone (`fe80::1%eth0`), which is local to the sender and may be any text."""
    if not isinstance(value, str) or "%" in value:
        raise ProtocolError("a dial-back without our address", peer=peer)
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ProtocolError("a dial-back without our address", peer=peer) from None


def _addresses(value: object) -> tuple[Address, ...]:
    """Addresses that can be dialled directly; others are left out."""
    found = []
    for text in value[:MAX_HINTS] if isinstance(value, list) else ():
        try:
            address = parse_address(text if isinstance(text, str) else "")
        except LocalError:
            continue
        if address.socket is not None and not address.relay:
            found.append(address)
    return tuple(found)


class ReachProbe:
    """Estimate of our reachability, and the known relays. `config` is the user's own."""

    def __init__(self, config: NodeConfig, peer_id: str, clock: Clock) -> None:
        self.core = Reachability(clock.monotonic())
        self._config = config
        self._peer_id = peer_id
        self._clock = clock
        self._known = {address.peer_id: address for address in config.peers}
        self._relays: dict[str, Address] = {relay.peer_id: relay for relay in config.relays}
        self._port = 0

    @property
    def estimate(self) -> ReachEstimate:
        """The present estimate."""
        return self.core.estimate

    @property
    def relays(self) -> list[Address]:
        """The relays known by now, in the order of preference."""
        return list(self._relays.values())

    def found_at(self, record: AddressRecord) -> None:
        """A peer has other addresses: dial it there from now on if it is a relay or one to join by."""
        for table in (self._known, self._relays):
            if record.peer_id in table and record.addresses:
                table[record.peer_id] = record.addresses[0]

    def forget(self) -> None:
        """Ask helpers at the next round: we may have another address."""
        self.core.doubted(self._clock.monotonic())

    def address_of(self, relay: Address) -> Address:
        """The present address of a relay."""
        return self._relays.get(relay.peer_id, relay)

    def forwarded(self, own: Collection[Address], helpers: int = 1) -> Address | None:
        """Our forwarded address, at which `helpers` outsiders reached us; None: unknown, or one of `own`."""
        estimate = self.estimate
        if estimate.reach is not ReachKind.PUBLIC or not estimate.outside or estimate.alike < helpers:
            return None
        there = at_socket(estimate.ip, estimate.port, self._peer_id)
        return None if there in own else there

    async def round(self, session: NetworkSession, port: int, *, served: bool) -> None:
        """Ask helpers if it is time, for at most ROUND_S; then `estimate` is up to date.

        `port`: where we listen. `served`: whether some relay has a slot for us, if we need one.
        """
        self._port = port
        with suppress(TimeoutError):
            async with asyncio.timeout(ROUND_S), asyncio.TaskGroup() as group:
                now = self._clock.monotonic()
                effects = self.core.moved(now, _machine_addresses())
                if not served:
                    effects += self.core.unserved(now)
                self._perform(group, session, [*effects, *await self._met(session)])
        self.core.tick(self._clock.monotonic())  # helpers that did not answer are not waited for any longer

    def adapted(self, current: NodeConfig, session: NetworkSession, *, served: bool) -> NodeConfig:
        """p2pd's configuration for the reachability found, from its `current` one. `served` as in `round`."""
        if self._config.reachability != "ask":
            return current
        estimate, own = self.estimate, session.addresses
        near = tuple(address for address in own if not address.relay and not is_far(address))
        if estimate.reach is ReachKind.PRIVATE and current.reachability == "private" and served:
            return current
        if estimate.reach is ReachKind.PRIVATE and self._relays:
            relays = tuple(self._relays.values())
            return replace(self._config, reachability="private", relays=relays, announce=near)
        if estimate.reach is ReachKind.PUBLIC:
            if (there := self.forwarded(own)) is not None:
                return replace(self._config, announce=(there, *near))
            return self._config if current.reachability == "private" else current
        return current

    async def hints(self, session: NetworkSession, asker: str) -> tuple[Sequence[str], Sequence[str]]:
        """(relays, other peers) as addresses, for a peer that asks us to dial it."""
        relays = list(self._relays.values())
        if self._config.reachability == "public":
            relays = far_first(session.addresses)[:2] + relays
        direct = {peer for peer, text in await _connections(session) if peer != asker and not relay_in(text)}
        near = random.sample(sorted(direct), min(len(direct), 2 * MAX_HINTS))  # each is a request to p2pd
        asking = [asyncio.ensure_future(_addresses_of(session, peer)) for peer in near]
        if asking:
            # p2pd searches the network for a peer that has just left
            await asyncio.wait(asking, timeout=HINT_S)
            for task in asking:
                task.cancel()
        found = [task.result() for task in asking if task.done() and not task.cancelled()]
        # The best address of each, then the second: it may be where a connection came from, where nothing
        # listens.
        others = [other for turn in itertools.zip_longest(*found) for other in turn if other is not None]
        return [str(relay) for relay in relays], [str(other) for other in others]

    # ── a round ────────────────────────────────────────────────────────────────────────────────────────────

    def _perform(self, group: asyncio.TaskGroup, session: NetworkSession, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                group.create_task(self._ask(group, session, effect.helper))
            else:
                estimate = effect.estimate
                _log.info("reachability: %s, peers that tried: %d", estimate.reach, estimate.peers)

    async def _ask(self, group: asyncio.TaskGroup, session: NetworkSession, helper: str) -> None:
        """Ask `helper` to dial us, and give its finding to the core; meet the peers that it names."""

        def hinted(hint: DialBackHint) -> None:
            for relay in hint.relays:
                self._note_relay(relay)
            for other in hint.others:
                if other.peer_id != self._peer_id:
                    group.create_task(self._meet(group, session, other))

        finding = None
        try:
            finding = await ask(session.control, helper, self._ports(session), hinted)
        except RemoteError as error:
            _log.debug("dial-back by %s: %s", helper, error)
        self._perform(group, session, self.core.answered(self._clock.monotonic(), helper, finding))

    def _note_relay(self, relay: Address) -> None:
        """Remember a relay. Our user's come first, at his addresses, and are never crowded out."""
        if relay.peer_id in (self._peer_id, *self._relays):
            return
        if relay.peer_id in self._known:
            self._relays = {relay.peer_id: self._known[relay.peer_id], **self._relays}
        elif sum(peer not in self._known for peer in self._relays) < MAX_HINTS:
            self._relays[relay.peer_id] = relay

    async def _meet(self, group: asyncio.TaskGroup, session: NetworkSession, other: Address) -> None:
        with suppress(P2pdError):
            await session.control.connect(other, MEET_S)
            self._perform(group, session, await self._met(session))

    async def _met(self, session: NetworkSession) -> list[Effect]:
        helpers = [peer for peer, text in await _connections(session) if text and not relay_in(text)]
        named_first = sorted(dict.fromkeys(helpers), key=lambda peer: peer not in self._known)
        return self.core.met(self._clock.monotonic(), named_first)

    def _ports(self, session: NetworkSession) -> list[int]:
        """The ports where we listen, and others that lead there (mapped by a router)."""
        found = [place[1] for address in session.addresses if not address.relay and (place := address.socket)]
        return list(dict.fromkeys([self._port, *found]))[:MAX_PORTS]


async def _addresses_of(session: NetworkSession, peer: str) -> list[Address]:
    """Addresses at which others may find a connected peer, the likeliest first."""
    try:
        return far_first(await session.control.addresses_of(peer))[:MAX_ADDRESSES]
    except P2pdError:
        return []


async def _connections(session: NetworkSession) -> list[tuple[str, str]]:
    try:
        return await session.control.connections()
    except P2pdError:
        return []  # p2pd has just died


def _machine_addresses() -> set[str]:
    import psutil

    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
