"""Reservations at a circuit relay (libp2p circuit v2): the right to be reached through it.

p2pd's own autorelay would reserve too, but reports no result, takes seconds to notice a lost relay, and
avoids a failed one for an hour. A reservation belongs to our peer id, whichever process asked; p2pd handles
the incoming circuits. The answer also names the limits of a circuit, which tell whether the relay is of use.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hetpeer.dht.base.errors import PeerLostError, ProtocolError, RemoteError
from hetpeer.dht.base.varint import read_fields, varint
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, P2pdError, read_message

HOP = "/libp2p/circuit/relay/0.2.0/hop"
MIN_DATA = 1 << 40
MIN_SECONDS = 24 * 3600
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
