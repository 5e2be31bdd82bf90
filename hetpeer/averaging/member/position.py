"""A volunteer's place in a run: which it chooses, and with which term-view and state it holds it.

Pure. A volunteer chooses itself, from the places that the coordinator offers. Only open places that fit its
memory count. The criteria, in this order: blocks without a holder, since nothing runs without them; places
that serve the run best by the coordinator's policy (bootstrap/state/placement_policy.py); blocks with the
fewest holders; blocks whose holders have left most often, which it can take over without a download (a backup
of the least reliable holder: Ravnest, 3.5.2); the largest place, so that strong machines leave small ones to
others; the first cluster, so that clusters fill up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hetpeer.averaging import messages as m
from hetpeer.dht.base.errors import ExitCode, LocalError


def choose_place(places: Iterable[m.Place], memory_bytes: int) -> m.Place:
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


@dataclass(slots=True)
class Position:
    """Term-view, place and state. Written by member.py alone; early_tensors.py fences tensors against it."""

    line: m.TermView = field(default_factory=lambda: m.TermView(term=0, view=0))
    place: m.Range | None = None
    """Blocks [begin, end) that the volunteer holds."""
    version: int | None = None
    """Version of the state in the worker; None while there is none that can be trusted."""
    digests: dict[int, str] = field(default_factory=dict)
    """Block → digest of its state at `version`."""
    group: tuple[int, int] = (0, 0)
    """Term and number of the last group that the volunteer averaged with."""

    def distrust(self) -> None:
        """Note that the worker no longer holds, or will not keep, the state of one known version."""
        self.version, self.digests = None, {}

    def held(self) -> tuple[m.Held, ...]:
        """The states that the volunteer vouches for, as messages name them; () if there is no version."""
        if self.version is None:
            return ()
        version = self.version
        return tuple(m.Held(block=b, version=version, digest=d) for b, d in sorted(self.digests.items()))
