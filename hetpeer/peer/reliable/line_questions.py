"""Questions of a coordinator to volunteers: what a line between two of them carries (docs/planning.md)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from hetpeer.dht.base.errors import RemoteError, short_id
from hetpeer.dht.discovery import LinkNote
from hetpeer.dht.node.node import Node
from hetpeer.peer.planning.asked_lines import Line, turns
from hetpeer.peer.probing.measurement_service import ASK_S, PROTOCOL

MOST_AMOUNT = 1e15
"""Largest believed number of an answer."""

_log = logging.getLogger(__name__)


async def measure_lines(node: Node, lines: Iterable[Line]) -> dict[tuple[str, str], LinkNote]:
    """Have volunteers measure `lines`, in turns so that none has two at a time: (sender, receiver) → note.

    What could not be measured is missing. Never raises for what a peer does.
    """
    found: dict[tuple[str, str], LinkNote] = {}
    for turn in turns(lines):
        for line, answer in zip(
            turn, await asyncio.gather(*(_ask(node, *line) for line in turn)), strict=True
        ):
            if answer is not None:
                one, other = line
                up, down, trip_s = answer
                found[one, other] = LinkNote(to=other[-8:], rate=up, trip_s=trip_s)
                found[other, one] = LinkNote(to=one[-8:], rate=down, trip_s=trip_s)
    return found


async def _ask(node: Node, peer: str, to: str) -> tuple[float, float, float] | None:
    """(bytes/s there, bytes/s back, round trip) as `peer` measured it; None if it did not."""
    with suppress(TimeoutError):
        try:
            async with asyncio.timeout(ASK_S):
                stream = await node.open(peer, PROTOCOL, timeout_s=ASK_S)
                try:
                    await stream.send({"to": to})
                    header = (await stream.receive(payload_limit=0)).header
                finally:
                    stream.abort()
            up, down, trip_s = (_amount(header.get(name)) for name in ("up", "down", "trip"))
        except RemoteError as error:  # an older version, among others
            _log.debug("%s does not measure its line to %s: %s", short_id(peer), short_id(to), error)
        else:
            return (up, down, trip_s) if up and down else None
    return None


def _amount(value: Any) -> float:
    """A number of an answer; 0 for what is none."""
    return float(value) if type(value) in (int, float) and 0.0 < value < MOST_AMOUNT else 0.0
