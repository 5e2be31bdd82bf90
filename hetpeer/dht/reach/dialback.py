"""`hetpeer/1/dialback`: "can you reach me?" The helper opens a fresh connection to where the question came
from.

    asker → helper   {"ports": [31330]}
    helper → asker   {"ip": "203.0.113.7", "relays": [...], "others": [...]}   at once
    helper → asker   {"port": 31330}                          0: at none of them; within DIAL_S + 1 s

A helper dials the IP address that it sees the asker at, never one that is named to it and never through a
relay. It answers only whether the asker itself proved to be there (tcp_probe.py). `relays` are reliable peers
to reserve a slot at, `others` addresses of more peers that could be asked, at most two of each; both are
claims.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hetpeer.dht.base.errors import LocalError, ProtocolError, RemoteError
from hetpeer.dht.base.runtime import Clock
from hetpeer.dht.base.untrusted import printable
from hetpeer.dht.identity.addresses import Address, parse_address, relay_in, socket_in
from hetpeer.dht.p2pd.p2pd_control import P2pdControl
from hetpeer.dht.p2pd.tcp_probe import is_peer
from hetpeer.dht.reach.reachability import ReachFinding
from hetpeer.dht.streams.stream import Stream

PROTOCOL = "hetpeer/1/dialback"
DIAL_S = 3.0
MAX_PORTS = 2
MAX_HINTS = 4
ANSWER_S = 3.0
WINDOW_S = 60.0
PER_PEER = 4
PER_IP = 64
AT_ONCE = 16
"""Questions taken in WINDOW_S from one peer and one IP address (a school, a carrier's NAT); dials
at a time.
"""

Hints = Callable[[str], Awaitable[tuple[Sequence[str], Sequence[str]]]]
"""Asking peer → (relays, other peers), as addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialBackHint:
    """A helper's hints beside its finding. They are claims."""

    relays: tuple[Address, ...] = ()
    others: tuple[Address, ...] = ()


class DialBudget:
    """Limits on the dials that others may cause. Pure: times are given."""

    def __init__(self) -> None:
        self._dialling = 0
        self._recent: dict[str, deque[float]] = defaultdict(deque)

    def admit(self, now: float, peer_id: str, ip: str) -> bool:
        """Whether to dial for this peer at this address now; if so it is counted."""
        for key in [key for key, times in self._recent.items() if times[-1] <= now - WINDOW_S]:
            del self._recent[key]
        for key, limit in ((peer_id, PER_PEER), (ip, PER_IP)):
            times = self._recent.get(key, ())
            if sum(time > now - WINDOW_S for time in times) >= limit:
                return False
        if self._dialling >= AT_ONCE:
            return False
        for key in (peer_id, ip):
            self._recent[key].append(now)
        return True

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count one dial during the block."""
        self._dialling += 1
        try:
            yield
        finally:
            self._dialling -= 1


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
    """An IP address without a zone (`fe80::1%eth0`), which is a name local to the sender and may
    be any text.
    """
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
