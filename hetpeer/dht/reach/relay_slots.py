"""Our slots at relays: reserved, renewed, and taken again at once when a relay comes back.

A slot is a reservation of libp2p's circuit v2: the right to be reached through a relay. p2pd's own autorelay
would reserve too, but reports no result, takes seconds to notice a lost relay, and avoids a failed one for an
hour. A reservation belongs to our peer id, whichever process asked; p2pd handles the incoming circuits. The
answer also has the limits of a circuit. A relay with too low a limit of bytes is not used.

`stranger` tests our own p2pd as a relay. p2pd starts two relay services, ours and libp2p's with 128 KiB and
two minutes for each circuit. The service that registered last answers; libp2p does not promise which that is
(measured on one processor: ours). So a throw-away p2pd takes a slot and reads the limits in the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from hetpeer.dht.base.errors import LocalError, PeerLostError, ProtocolError, RemoteError
from hetpeer.dht.base.runtime import Clock, TaskSet, process_folder
from hetpeer.dht.base.untrusted import read_fields, varint
from hetpeer.dht.identity.addresses import Address, through
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, P2pdError, read_message
from hetpeer.dht.p2pd.p2pd_process import NodeConfig, P2pd
from hetpeer.dht.p2pd.tcp_probe import listens

HOP = "/libp2p/circuit/relay/0.2.0/hop"
MIN_DATA = 1 << 36
MIN_SECONDS = 3600
"""Least bytes and seconds that a circuit must allow; libp2p's own limits are 128 KiB and 2 minutes."""
_RESERVE = b"\x08\x00"
_OK = 100
_REFUSALS = {
    200: "it refused",
    201: "it has no room",
    203: "the connection failed",
    204: "no reservation",
    400: "it did not understand",
}
MAX_SLOTS = 3
RENEW_S = 30.0
"""Seconds between renewals. An hour's slot ends with the connection; short breaks may go unnoticed."""
USELESS_S = 60.0
"""Seconds until a relay is asked again that refused or whose circuits are too short."""
FAILED_S = 3.0
"""Seconds until a relay is asked again that did not answer."""
RETURN_S = 3.0
"""Seconds that streams wait for a relay that has just disappeared."""
GRACE_S = 10.0
"""Seconds that a relay may be away before others are looked for."""
_ASK_S = 5.0
_KNOCK_S = 1.0
_KNOCK_PAUSE_S = 0.1
_MAX_KNOCK_PAUSE_S = 2.0
_DEADLINE_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayReservation:
    """A relay's answer. `expires` is its wall clock, in seconds since 1970; a limit of 0 means none."""

    expires: int
    max_bytes: int
    max_seconds: int

    @property
    def useful(self) -> bool:
        """Whether tensors can pass."""
        return not 0 < self.max_bytes < MIN_DATA and not 0 < self.max_seconds < MIN_SECONDS


async def reserve(control: P2pdControl, relay: str, timeout_s: float) -> RelayReservation:
    """Ask `relay`, to which we are connected, for a slot or its renewal. Raises `RemoteError`."""
    try:
        async with asyncio.timeout(timeout_s):
            wire = await control.open_wire(relay, HOP, timeout_s)
            try:
                await wire.write([varint(len(_RESERVE)), _RESERVE])
                answer = await read_message(wire)
            finally:
                wire.abort()
    except TimeoutError:
        raise PeerLostError(relay, f"it gave no slot within {timeout_s} s") from None
    except P2pdError as error:
        raise ProtocolError("an answer to a reservation that is none", peer=relay, why=error.why) from error
    return reservation_in(answer, relay)


def reservation_in(answer: bytes, relay: str) -> RelayReservation:
    """The reservation in a relay's answer. Raises `RemoteError` HP-NET-013 if it grants none."""
    try:
        fields = read_fields(answer)
        if fields.get(5) != _OK:
            status = fields.get(5)
            why = _REFUSALS.get(status, "no reason given") if isinstance(status, int) else "no reason given"
            raise RemoteError(
                "HP-NET-013",
                "a relay gave no slot",
                peer=relay,
                why=why,
                fix="nothing: others are asked, and this one again later",
            )
        slot = read_fields(_bytes(fields.get(3)))
        limit = read_fields(_bytes(fields.get(4, b"")))
    except ValueError as error:
        raise ProtocolError("an answer to a reservation that is none", peer=relay) from error
    return RelayReservation(
        expires=_number(slot.get(1)), max_bytes=_number(limit.get(2)), max_seconds=_number(limit.get(1))
    )


def _bytes(value: int | bytes | None) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field that is missing or a number")  # noqa: TRY004 - of the message, not of our code
    return value


def _number(value: int | bytes | None) -> int:
    return value if isinstance(value, int) else 0


class RelaySlots:
    """Reservations at the first MAX_SLOTS of `relays`, which are in the order of preference.

    `needed`: nobody reaches us without them; else they serve the few that cannot connect directly.
    """

    def __init__(self, relays: Sequence[Address], clock: Clock, *, needed: bool) -> None:
        self.needed = needed
        self.relays = {relay.peer_id: relay for relay in relays[:MAX_SLOTS]}
        self._clock = clock
        self._due: dict[str, float] = {}
        """Relay → when to ask it again, if it gave a slot or refused."""
        self._held: set[str] = set()
        self._busy: set[str] = set()
        self._tasks = TaskSet()
        self._callers: dict[str, set[str]] = {relay: set() for relay in self.relays}
        self._empty_since: float | None = clock.monotonic()
        self._absent_since: float | None = None
        """Time at which the last connection to a relay was lost; None while there is one."""
        self.some = asyncio.Event()
        """Set while there is a slot."""

    @property
    def held(self) -> list[str]:
        """The relays through which we can be reached, by peer id."""
        return [relay for relay in self.relays if relay in self._held]

    @property
    def serve(self) -> bool:
        """Whether there is a slot, or was one within GRACE_S."""
        return self._empty_since is None or self._clock.monotonic() < self._empty_since + GRACE_S

    def tend(self, control: P2pdControl, connected: set[str], circuits: dict[str, Collection[str]]) -> None:
        """Take the missing slots. `circuits`: relay → peers reached through it, to call when it is back."""
        now = self._clock.monotonic()
        if not connected.isdisjoint(self.relays):
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = now
        for relay, address in self.relays.items():
            if relay not in connected:
                self._lose(relay)
            if callers := circuits.get(relay):
                self._callers[relay] = set(callers)
            if relay in self._busy or (relay in connected and now < self._due.get(relay, now)):
                continue
            self._busy.add(relay)
            self._tasks.spawn(self._take(control, address, relay in connected), name=f"slot at {relay}")

    async def refill(self, control: P2pdControl) -> None:
        """Take the slots again with a new p2pd; if they are needed, wait up to RETURN_S for the first."""
        for relay in self.relays:
            self._lose(relay)
        self.tend(control, {peer for peer, _ in await control.connections()}, {})
        if not self.needed:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(RETURN_S):
                await self.some.wait()

    async def gate(self, control: P2pdControl, peer_id: str) -> None:
        """Wait while dialling `peer_id` would fail for lack of relays: libp2p would not retry for 5 s.

        Returns at once if the slots are not needed. Raises `P2pdError`.
        """
        if not self.needed:
            return
        connected = {peer for peer, _ in await control.connections()}
        if peer_id in connected or not connected.isdisjoint(self.relays):
            return
        self.tend(control, connected, {})
        assert self._absent_since is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._absent_since + RETURN_S - self._clock.monotonic()):
                await self.some.wait()

    async def close(self) -> None:
        """Stop asking for slots."""
        await self._tasks.close()

    def _lose(self, relay: str) -> None:
        self._due.pop(relay, None)
        if relay in self._held:
            self._held.discard(relay)
            _log.info("the relay %s has gone", relay)
        if not self._held and self.some.is_set():
            self.some.clear()
            self._empty_since = self._clock.monotonic()

    async def _take(self, control: P2pdControl, relay: Address, connected: bool) -> None:
        """Reserve a slot at `relay`, or renew it; a failed or useless relay is tried again later."""
        try:
            if not connected:
                await self._reach(control, relay)
            slot = await reserve(control, relay.peer_id, _ASK_S)
        except RemoteError as error:
            _log.debug("no slot at %s: %s", relay, error)
            pause_s = USELESS_S if error.code == "HP-NET-013" else FAILED_S
            self._due[relay.peer_id] = self._clock.monotonic() + pause_s  # void once it is disconnected
            return
        finally:
            self._busy.discard(relay.peer_id)
        now = self._clock.monotonic()
        self._due[relay.peer_id] = now + (RENEW_S if slot.useful else USELESS_S)
        if not slot.useful:
            _log.warning("the relay %s lets only %d bytes pass: not used", relay.peer_id, slot.max_bytes)
            return
        new = relay.peer_id not in self._held
        self._held.add(relay.peer_id)
        self._empty_since = None
        self.some.set()
        if new:
            _log.info("reached through the relay %s", relay.peer_id)
            await self._call(control, relay)

    async def _reach(self, control: P2pdControl, relay: Address) -> None:
        """Connect to a lost relay as soon as something listens there again."""
        pause_s, place = _KNOCK_PAUSE_S, relay.socket
        while place is not None and not await listens(*place, _KNOCK_S):
            await asyncio.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _MAX_KNOCK_PAUSE_S)
        await control.connect(relay, _ASK_S)

    async def _call(self, control: P2pdControl, relay: Address) -> None:
        """Call peers whose circuits broke with the relay. They call too; the later slot's side succeeds."""
        callers, self._callers[relay.peer_id] = self._callers[relay.peer_id], set()
        for peer in callers:
            with suppress(RemoteError):
                await control.connect(through(relay, peer), _ASK_S)


Offered = Callable[[Address], Awaitable[RelayReservation]]
"""Offer of a relay on this machine to strangers. Raises `LocalError`, `RemoteError`."""


@asynccontextmanager
async def stranger() -> AsyncIterator[Offered]:
    """A throw-away p2pd, which starts while the caller does something else."""
    starting = asyncio.ensure_future(_start())

    async def offered(relay: Address) -> RelayReservation:
        control = P2pdControl((await asyncio.shield(starting)).control_path)
        await control.connect(relay, _DEADLINE_S)
        return await reserve(control, relay.peer_id, _DEADLINE_S)

    try:
        yield offered
    finally:
        starting.cancel()  # no effect when done
        with suppress(LocalError, asyncio.CancelledError):
            await (await starting).close()


async def _start() -> P2pd:
    """Start the throw-away p2pd; all of this process share one identity. Raises `LocalError`."""
    identity = Identity.load_or_create(Path(_folder().name) / "key")
    return await P2pd.start(NodeConfig(), identity, port=0)


@cache
def _folder() -> TemporaryDirectory[str]:
    """Folder of the throw-away identity, kept as long as this process."""
    return process_folder("stranger")
