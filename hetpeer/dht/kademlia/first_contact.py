"""First contact with the peers to join by: a hello, what it reveals, and plain reasons when it fails.

We connect to each address ourselves: p2pd's own `-b` ends the process when none answers, without a reason.

hivemind refuses peers whose wall clock is more than 3 s off, but says so only in a log. A second process with
the same key makes streams end at the wrong one. The answer to a hello shows both: the peer's wall time, and
how many connections it has to our id, which must not be more than we have to it.

Any node of hivemind's DHT will do, too: one that does not know our hello is pinged in hivemind's own way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetpeer.dht.base.errors import ExitCode, LocalError, PeerLostError, ProtocolError, RemoteError
from hetpeer.dht.base.runtime import Clock
from hetpeer.dht.identity.addresses import Address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.kademlia.hivemind_ping import clock_offset
from hetpeer.dht.p2pd.listener import Handler
from hetpeer.dht.p2pd.p2pd_control import P2pdControl
from hetpeer.dht.p2pd.tcp_probe import listens
from hetpeer.dht.streams.stream import Stream

PROTOCOL = "hetpeer/1/hello"
MAX_CLOCK_OFFSET_S = 3.0
"""hivemind's MAX_DHT_TIME_DISCREPANCY_SECONDS."""
_ANSWER_DEADLINE_S = 5.0
_TWIN_CHECKS = 3
_TWIN_CHECK_PAUSE_S = 0.4
CONNECT_DEADLINE_S = 5.0
MEETING_DEADLINE_S = 10.0
OTHERS_S = 1.0
MAX_REASONS = 5
GREETINGS, PAUSE_S = 3, 0.3
"""Greetings tried. If both sides dial at once, one of the connections is closed with its streams."""
_NOT_SPOKEN = "protocols not supported"
"""libp2p's message for a peer that does not know our hello."""
_PLAIN_REASONS = {
    "connection refused": "nothing listens there (connection refused)",
    "peer id mismatch": "another peer listens there (its id is not the one in the address)",
    "no route to host": "there is no route to that machine",
    "network is unreachable": "this machine has no way to that network",
    "no such host": "that name does not exist",
    _NOT_SPOKEN: "what listens there is neither a hetpeer of this version nor a node of hivemind's DHT",
    "no answer within": f"no answer within {CONNECT_DEADLINE_S:.0f} s",
    "i/o timeout": "no answer in time",
    "deadline exceeded": "no answer in time",
}
"""A stable part of libp2p's message → the reason in a user's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """A peer's answer. `clock_offset_s`: its wall clock minus ours; `connections`: number to our id."""

    peer_id: str
    clock_offset_s: float
    connections: int

    @property
    def clock_agrees(self) -> bool:
        """Whether the peer's clock is within MAX_CLOCK_OFFSET_S of ours."""
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
    """The peers whose clocks agree with ours. Raises `LocalError` HP-NET-004 if there are only others."""
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


async def meet(
    control: P2pdControl,
    clock: Clock,
    addresses: Iterable[Address],
    *,
    timeout_s: float = MEETING_DEADLINE_S,
    knock: bool = False,
) -> tuple[list[JoinAnswer], list[str]]:
    """Connect to all addresses at once. Returns answers to our hello, and a reason for each without one.

    Once one peer has answered, the others have OTHERS_S left, so that a dead address delays nobody. `knock`:
    leave out addresses where nothing listens, without telling p2pd.
    """
    meetings = {
        asyncio.ensure_future(_meet_one(control, clock, address, knock=knock)): address
        for address in addresses
    }
    if not meetings:
        return [], []
    try:
        await _somebody(meetings, timeout_s)
    finally:
        for meeting in meetings:
            meeting.cancel()  # no effect on those that are done
        await asyncio.gather(*meetings, return_exceptions=True)
    hellos, reasons = [], []
    for meeting, address in meetings.items():
        outcome = "no answer in time" if meeting.cancelled() else meeting.result()
        if isinstance(outcome, JoinAnswer):
            hellos.append(outcome)
        else:
            reasons.append(f"{address}: {outcome}")
    return hellos, reasons


async def _somebody(meetings: Collection[asyncio.Future[JoinAnswer | str]], timeout_s: float) -> None:
    """Return when all have ended, OTHERS_S after the first answer, or after `timeout_s`."""
    left = set(meetings)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                if left and any(isinstance(meeting.result(), JoinAnswer) for meeting in done):
                    await asyncio.wait(left, timeout=OTHERS_S)
                    return


def nobody_answers(reasons: list[str]) -> LocalError:
    """HP-NET-002 with the reason for each address, at most MAX_REASONS of them."""
    more = len(reasons) - MAX_REASONS
    return LocalError(
        "HP-NET-002",
        f"none of the {len(reasons)} peers to join by can be reached"
        if len(reasons) > 1
        else "the peer to join by cannot be reached",
        why="; ".join([*reasons[:MAX_REASONS], *([f"and {more} more"] if more > 0 else [])]),
        fix="check that the other peer runs and that its address is whole",
        exit_code=ExitCode.NETWORK,
    )


async def _meet_one(control: P2pdControl, clock: Clock, address: Address, *, knock: bool) -> JoinAnswer | str:
    """The peer's answer, or the reason why there is none; `knock`: dial only if something listens."""
    place = address.socket
    if knock and place is not None and not await listens(*place, CONNECT_DEADLINE_S):
        return "nothing listens there"
    try:
        await control.connect(address, CONNECT_DEADLINE_S)
        return await _greet(control, clock, address.peer_id)
    except RemoteError as error:
        text = error.detail if isinstance(error, ProtocolError) else error.why
        if _NOT_SPOKEN in text and (answer := await _ping(control, clock, address.peer_id)) is not None:
            return answer
        return next((plain for sign, plain in _PLAIN_REASONS.items() if sign in text), text)


async def _greet(control: P2pdControl, clock: Clock, peer_id: str) -> JoinAnswer:
    """Say hello to a connected peer; repeat if the stream breaks. Raises `PeerLostError`, `ProtocolError`."""
    for _ in range(GREETINGS - 1):
        with contextlib.suppress(PeerLostError):
            return await say_hello(control, clock, peer_id)
        await asyncio.sleep(PAUSE_S)
    return await say_hello(control, clock, peer_id)


async def _ping(control: P2pdControl, clock: Clock, peer_id: str) -> JoinAnswer | None:
    """The answer of a node of hivemind's DHT that is no hetpeer; None if it is no such node.

    Nobody there counts our connections: a process with the same key is found out by the run's peers.
    """
    try:
        offset = await clock_offset(control, clock, peer_id, _ANSWER_DEADLINE_S)
    except RemoteError:
        return None
    return JoinAnswer(peer_id=peer_id, clock_offset_s=offset, connections=0)
