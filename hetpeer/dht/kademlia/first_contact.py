"""First contact with the peers to join by, and plain reasons when it fails.

We connect to each address ourselves, because p2pd's own `-b` ends the process when none answers and does not
say which one refused and why.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable

from hetpeer.dht.base.clock import Clock
from hetpeer.dht.base.errors import ExitCode, LocalError, PeerLostError, ProtocolError, RemoteError
from hetpeer.dht.identity.addresses import Address
from hetpeer.dht.kademlia.join_handshake import JoinAnswer, say_hello
from hetpeer.dht.p2pd.p2pd_control import P2pdControl
from hetpeer.dht.p2pd.tcp_probe import listens

CONNECT_DEADLINE_S = 5.0
MEETING_DEADLINE_S = 10.0
OTHERS_S = 1.0
MAX_REASONS = 5
GREETINGS, PAUSE_S = 3, 0.3
"""Greetings tried. Both sides may dial at the same time; then one of the two connections is closed with its
streams.
"""

_PLAIN_REASONS = {
    "connection refused": "nothing listens there (connection refused)",
    "peer id mismatch": "another peer listens there (its id is not the one in the address)",
    "no route to host": "there is no route to that machine",
    "network is unreachable": "this machine has no way to that network",
    "no such host": "that name does not exist",
    "protocols not supported": "what listens there is not a hetpeer of this version",
    "no answer within": f"no answer within {CONNECT_DEADLINE_S:.0f} s",
    "i/o timeout": "no answer in time",
    "deadline exceeded": "no answer in time",
}
"""A stable part of libp2p's message → the reason in a user's words."""


async def meet(
    control: P2pdControl,
    clock: Clock,
    addresses: Iterable[Address],
    *,
    timeout_s: float = MEETING_DEADLINE_S,
    knock: bool = False,
) -> tuple[list[JoinAnswer], list[str]]:
    """Connect to all addresses at once. Returns the answers to our hello, and a reason for each address
    without one.

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
    place = address.socket
    if knock and place is not None and not await listens(*place, CONNECT_DEADLINE_S):
        return "nothing listens there"
    try:
        await control.connect(address, CONNECT_DEADLINE_S)
        return await _greet(control, clock, address.peer_id)
    except RemoteError as error:
        text = error.detail if isinstance(error, ProtocolError) else error.why
        return next((plain for sign, plain in _PLAIN_REASONS.items() if sign in text), text)


async def _greet(control: P2pdControl, clock: Clock, peer_id: str) -> JoinAnswer:
    """Say hello to a connected peer; repeat if the stream breaks. Raises `PeerLostError`, `ProtocolError`."""
    for _ in range(GREETINGS - 1):
        with contextlib.suppress(PeerLostError):
            return await say_hello(control, clock, peer_id)
        await asyncio.sleep(PAUSE_S)
    return await say_hello(control, clock, peer_id)
