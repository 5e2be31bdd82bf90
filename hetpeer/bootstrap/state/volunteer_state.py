"""A volunteer as the coordinator sees it, and the table of its life cycle. Pure.

Only this module sets `Volunteer.life_cycle`; everybody else calls a transition by its name.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hetpeer.averaging.messages import Held, Hello, Range

RECENT = 0.3
"""Weight of the last report in the smoothed uplink."""


class LifeCycle(enum.Enum):
    """JOINING has no state, PREPARED wants it, SYNCING fetches it, READY works."""

    JOINING = "joining"
    PREPARED = "prepared"
    SYNCING = "syncing"
    READY = "ready"


_JOINING, _PREPARED, _SYNCING, _READY = LifeCycle

_NEXT: Final[Mapping[str, tuple[LifeCycle, LifeCycle, LifeCycle, LifeCycle]]] = {
    # transition  from JOINING  PREPARED   SYNCING    READY
    "rejoin":    (_JOINING,  _JOINING,  _JOINING,  _JOINING),
    "prepare":   (_PREPARED, _PREPARED, _PREPARED, _PREPARED),
    "fetch":     (_SYNCING,  _SYNCING,  _SYNCING,  _SYNCING),
    "work":      (_READY,    _READY,    _READY,    _READY),
    "outdate":   (_JOINING,  _PREPARED, _PREPARED, _PREPARED),
}  # fmt: skip
"""Transition → the next state from each state, in the order of `LifeCycle`."""


@dataclass(slots=True)
class VolunteerState:
    """One member, as the coordinator sees it. Times are the coordinator's monotonic seconds."""

    peer: str
    incarnation: int
    heard_at: float
    wire_version: int = 0
    """The latest wire version that it speaks."""
    flops_per_second: float = 0.0
    product_flops: float = 0.0
    """FLOP/s in products of large matrices; `flops_per_second` if nothing else was tried; 0: not reported."""
    memory_bytes: int = 0
    name: str = ""
    life_cycle: LifeCycle = LifeCycle.JOINING
    cluster: int = -1
    place: Range | None = None
    slow: bool = False
    """It has had its place for long and never worked there: others may come to its blocks."""
    missed: int = 0
    """Versions in a row that it held only when they were past."""
    broken_at: float | None = None
    computing: float = 0.0
    """Seconds of a microbatch at its place, as it last reported; 0 before."""
    links: Mapping[str, float] = field(default_factory=dict)
    """Peer → seconds of a microbatch's bundle on the link there, uncompressed."""
    uplink: float = 0.0
    """Smoothed bytes/s that leave it; 0 before it reports."""
    digests: dict[int, str] = field(default_factory=dict)
    """Block → digest of its state at the current version, as far as it has reported."""
    shuns: frozenset[str] = frozenset()
    """Peers that it does not work with for now, by its own report."""
    witness: bool = False
    """Whether it made its state of the current version itself, and did not copy another's."""

    @classmethod
    def of(cls, peer: str, hello: Hello, now: float) -> VolunteerState:
        """A volunteer from its `hello`."""
        return cls(
            peer,
            hello.incarnation,
            now,
            hello.wire_version,
            flops_per_second=hello.flops_per_second,
            product_flops=hello.product_flops,
            memory_bytes=hello.memory_bytes,
            name=hello.name,
            uplink=hello.uplink,
        )

    def homeless(self) -> VolunteerState:
        """A copy without a place."""
        return replace(
            self,
            life_cycle=LifeCycle.JOINING,
            cluster=-1,
            place=None,
            slow=False,
            missed=0,
            digests={},
            witness=False,
        )

    def measured(self, uplink: float) -> None:
        """Smooth a reported uplink of this many bytes/s; one busy moment must not change who reduces how
        much.
        """
        known = self.uplink and uplink
        self.uplink = self.uplink + RECENT * (uplink - self.uplink) if known else uplink or self.uplink

    def heard(self, now: float) -> None:
        """It has sent a message, or its stream is back."""
        self.broken_at, self.heard_at = None, now

    def holds(self, held: Sequence[Held], version: int) -> bool:
        """Whether `held` is all of its place at `version`."""
        blocks = range(*(self.place or (0, 0)))
        return [h.block for h in held] == list(blocks) and all(h.version == version for h in held)

    # ── transitions ─────────────────────────────────────────────────────────────────────────────────────────

    def _enter(self, transition: str) -> None:
        self.life_cycle = _NEXT[transition][list(LifeCycle).index(self.life_cycle)]

    def rejoin(self) -> None:
        """It got another place, left the step, or the run rolled back: it prepares again."""
        self._enter("rejoin")

    def prepare(self) -> None:
        """It has loaded the graphs of its place, or its state is not the one that is needed now."""
        self._enter("prepare")

    def fetch(self) -> None:
        """It was told to fetch the current version, or to report whether it still holds it."""
        self._enter("fetch")

    def work(self) -> None:
        """It holds the current version."""
        self._enter("work")
        self.missed = 0

    def outdate(self) -> None:
        """A version was made without it. A volunteer that held or fetched the one before missed it."""
        self.missed += self.life_cycle in (LifeCycle.SYNCING, LifeCycle.READY)
        self._enter("outdate")
