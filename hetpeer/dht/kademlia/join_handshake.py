"""The first exchange with a peer to join by. It checks our clock, and that our identity is not in use
elsewhere.

hivemind refuses peers whose wall clock is more than 3 s off, but says so only in a log. A second process with
the same key makes streams end at the wrong one. The answer to a hello shows both: the peer's wall time, and
how many connections it has to our id, which must not be more than we have to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetpeer.dht.base.clock import Clock
from hetpeer.dht.base.errors import ExitCode, LocalError, PeerLostError, ProtocolError, RemoteError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.p2pd.listener import Handler
from hetpeer.dht.p2pd.p2pd_control import P2pdControl
from hetpeer.dht.streams.stream import Stream

PROTOCOL = "hetpeer/1/hello"
MAX_CLOCK_OFFSET_S = 3.0
"""hivemind's MAX_DHT_TIME_DISCREPANCY_SECONDS."""
_ANSWER_DEADLINE_S = 5.0
_TWIN_CHECKS = 3
_TWIN_CHECK_PAUSE_S = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """A peer's answer. `clock_offset_s` is its wall clock minus ours; `connections` are those it has to our
    id.
    """

    peer_id: str
    clock_offset_s: float
    connections: int

    @property
    def clock_agrees(self) -> bool:
        """Whether its clock is within MAX_CLOCK_OFFSET_S of ours."""
        return abs(self.clock_offset_s) <= MAX_CLOCK_OFFSET_S


def answer_hello(control: P2pdControl, clock: Clock) -> Handler:
    """The handler that each node serves under PROTOCOL."""

    async def handle(stream: Stream) -> None:
        await stream.receive(payload_limit=0, timeout_s=_ANSWER_DEADLINE_S)
        try:
            count = sum(peer == stream.peer_id for peer, _ in await control.connections())
        except RemoteError:  # without our p2pd's answer there is no reason to turn anybody away
            count = 0
        await stream.send({"wall": clock.wall(), "connections": count}, timeout_s=_ANSWER_DEADLINE_S)

    return handle


async def say_hello(control: P2pdControl, clock: Clock, peer_id: str) -> JoinAnswer:
    """Ask `peer_id`. Raises `PeerLostError` or `ProtocolError`."""
    async with await control.open_stream(peer_id, PROTOCOL, _ANSWER_DEADLINE_S) as stream:
        asked_at = clock.wall()
        await stream.send({})
        header = (await stream.receive(payload_limit=0, timeout_s=_ANSWER_DEADLINE_S)).header
        midway = (asked_at + clock.wall()) / 2
    return read_hello(header, peer_id, midway)


def read_hello(header: Mapping[str, Any], peer_id: str, midway: float) -> JoinAnswer:
    """Parse the answer of `peer_id`, given at `midway` by our wall clock. Raises `ProtocolError`."""
    wall, connections = header.get("wall"), header.get("connections")
    if not isinstance(wall, int | float) or not isinstance(connections, int):
        raise ProtocolError("an answer to hello without a time", peer=peer_id)
    return JoinAnswer(peer_id=peer_id, clock_offset_s=wall - midway, connections=connections)


def check_clock(hellos: list[JoinAnswer]) -> list[JoinAnswer]:
    """The peers whose clocks agree with ours. Raises `LocalError` HP-NET-004 if there are answers and none
    agrees.
    """
    agreeing = [hello for hello in hellos if hello.clock_agrees]
    if hellos and not agreeing:
        nearest = min(hellos, key=lambda hello: abs(hello.clock_offset_s))
        direction = "behind" if nearest.clock_offset_s > 0 else "ahead of"
        raise LocalError(
            "HP-NET-004",
            f"this machine's clock is {abs(nearest.clock_offset_s):.0f} s {direction}"
            f" that of {nearest.peer_id}",
            why=f"records expire by the clock, so peers must agree within {MAX_CLOCK_OFFSET_S:.0f} s",
            fix="set the clock (timedatectl set-ntp true)",
            exit_code=ExitCode.NETWORK,
        )
    return agreeing


async def check_alone(control: P2pdControl, clock: Clock, identity: Identity, hello: JoinAnswer) -> None:
    """Raise `LocalError` HP-ID-002 if the peer keeps seeing more connections from our id than we have to it.

    Asks more than once, since a connection that is being closed may be counted on one side only.
    """
    for _ in range(_TWIN_CHECKS):
        ours = sum(peer == hello.peer_id for peer, _ in await control.connections())
        if hello.connections <= ours:
            return
        await asyncio.sleep(_TWIN_CHECK_PAUSE_S)
        try:
            hello = await say_hello(control, clock, hello.peer_id)
        except (PeerLostError, ProtocolError):
            return  # it left; nothing more to learn from it
    raise LocalError(
        "HP-ID-002",
        f"another process runs with the identity {identity.path}",
        why=f"{hello.peer_id} is connected to {identity.peer_id} elsewhere too",
        fix="end the other one, or use another identity file; after a power cut wait a minute",
        exit_code=ExitCode.IDENTITY,
    )
