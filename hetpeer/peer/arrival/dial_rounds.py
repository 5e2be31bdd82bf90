"""Addresses that a joining volunteer dials, and its pauses between tries (docs/joining.md). Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetpeer.dht.identity.addresses import Address

ROUNDS = 5
"""Pauses of a volunteer that was never in the run: most likely the address is wrong."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0


@dataclass(frozen=True, slots=True)
class Round:
    """Dial `addresses`, all at once. If that leads nowhere, go on after `pause_s`; None: give up."""

    addresses: tuple[Address, ...]
    pause_s: float | None


def rounds(named: tuple[Address, ...], remembered: tuple[Address, ...] | None) -> Iterator[Round]:
    """Rounds of dialling; without end for a home that was in the run before.

    `remembered`: addresses at which the run was found before; None: this home was never in it. The first
    round leaves them out, unless no address is named.
    """
    everybody = tuple(dict.fromkeys((*named, *(remembered or ()))))
    if named and everybody != named:
        yield Round(named, 0.0)
    pause_s, count = FIRST_PAUSE_S, 1
    while remembered is not None or count < ROUNDS:
        yield Round(everybody, pause_s)
        pause_s, count = min(2 * pause_s, LONGEST_PAUSE_S), count + 1
    yield Round(everybody, None)
