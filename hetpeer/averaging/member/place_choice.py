"""The choice of a place: a volunteer chooses itself, from the places that the coordinator offers.

Pure. Only open places that fit its memory count. The criteria, in this order: blocks without a holder, since
nothing runs without them; places with which a step is shortest, as far as the coordinator knows
(bootstrap/state/placement.py); blocks with the fewest holders; blocks whose holders have left most often,
which it can take over without a download (a backup of the least reliable holder: Ravnest, 3.5.2); the largest
place, so that strong machines leave small ones to others; the first cluster, so that clusters fill up.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetpeer.averaging.messages import Place
from hetpeer.dht.base.errors import ExitCode, LocalError


def choose_place(places: Iterable[Place], memory_bytes: int) -> Place:
    """The place to claim with `memory_bytes` of memory. Raises `LocalError` HP-FIT-001 if none fits."""
    offered = [place for place in places if place.open]
    fitting = [place for place in offered if place.memory_bytes <= memory_bytes]
    if not fitting:
        smallest = min((place.memory_bytes for place in offered), default=0)
        raise LocalError(
            "HP-FIT-001",
            "no open place of this run fits into this machine's memory",
            why=f"the smallest needs {smallest / 2**20:.0f} MiB, this machine offers "
            f"{memory_bytes / 2**20:.0f} MiB",
            fix="allow more with --ram-limit (on a GPU, close what else uses it), or ask the run's author "
            "for more and smaller stages",
            exit_code=ExitCode.TOO_SMALL,
        )
    return min(
        fitting,
        key=lambda p: (p.holders > 0, p.rank, p.holders, -p.departures, -p.memory_bytes, p.cluster, p.begin),
    )
