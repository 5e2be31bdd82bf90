"""A volunteer as the coordinator sees it: its place, what it said of itself, and the transitions of its life.

Pure. Only this module sets `VolunteerState.life_cycle`; everybody else calls a transition by its name.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetpeer.averaging.messages import Held, Hello, Place, Range
from hetpeer.stages.pipeline.place_memory import Offered, choose
from hetpeer.stages.planning.network_coordinates import Coordinate

RECENT = 0.3
"""Weight of the last report in the smoothed uplink."""


class LifeCycle(enum.Enum):
    """JOINING has no state, PREPARED wants it, SYNCING fetches it, READY works."""

    JOINING = "joining"
    PREPARED = "prepared"
    SYNCING = "syncing"
    READY = "ready"


@dataclass(slots=True)
class VolunteerState:
    """One member, as the coordinator sees it. Times are the coordinator's monotonic seconds."""

    peer: str
    incarnation: int
    heard_at: float
    wire_version: int = 0
    """The latest wire version that the volunteer speaks."""
    flops_per_second: float = 0.0
    product_flops: float = 0.0
    """FLOP/s in products of large matrices; `flops_per_second` if nothing else was tried; 0: not reported."""
    offered: Offered | None = None
    """Its offer to a place; None: not reported, and taken to be enough for any."""
    name: str = ""
    life_cycle: LifeCycle = LifeCycle.JOINING
    cluster: int = -1
    place: Range | None = None
    planned: tuple[int, Range] | None = None
    """Its seat in the plan that is in force (planned_seats.py): cluster and blocks."""
    slow: bool = False
    """The volunteer has had its place for long and never worked there: others may come to its blocks."""
    worked: bool = False
    """Whether the volunteer has held the current version in this session."""
    warm: tuple[int, Mapping[int, str]] | None = None
    """Version of its place that a backup holds, and its digests; None: none of the present history."""
    copied: tuple[Range, int] | None = None
    """Place and version of the last checkpoint that it held as a backup; most likely its disk has a copy."""
    missed: int = 0
    """Versions in a row that the volunteer held only when they were past."""
    broken_at: float | None = None
    computing: float = 0.0
    """Seconds of a microbatch at its place, as it last reported; 0 before."""
    links: Mapping[str, float] = field(default_factory=dict)
    """Peer → seconds of a microbatch's bundle on the link there, uncompressed."""
    uplink: float = 0.0
    """Smoothed bytes/s that the volunteer can send: by its hello, until it reports what traffic shows; 0:
    unknown.
    """
    downlink: float = 0.0
    """Bytes/s that the volunteer can receive, by its hello; 0: unknown."""
    coordinate: Coordinate | None = None
    """Where it is in the network, as it last said; None: unknown."""
    uplink_seen: bool = False
    """Whether the uplink is that of traffic."""
    digests: dict[int, str] = field(default_factory=dict)
    """Block → digest of its state at the current version, as far as it has reported."""
    shuns: frozenset[str] = frozenset()
    """Peers that the volunteer does not work with for now, by its own report."""
    witness: bool = False
    """Whether the volunteer made its state of the current version itself, and did not copy another's."""
    leaves_by: float | None = None
    """Latest time at which the volunteer goes, after a farewell; None: it stays."""

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
            offered=hello.offered,
            name=hello.name,
            uplink=hello.uplink,
            downlink=hello.downlink,
            coordinate=Coordinate.of(hello.coordinate),
        )

    def homeless(self) -> VolunteerState:
        """A copy without a place."""
        return replace(
            self,
            life_cycle=LifeCycle.JOINING,
            cluster=-1,
            place=None,
            slow=False,
            worked=False,
            warm=None,
            copied=None,
            missed=0,
            digests={},
            witness=False,
        )

    def measured(self, uplink: float) -> None:
        """Take up a reported uplink of this many bytes/s; 0: traffic has shown none.

        The first one replaces what the hello claims, which may be far off. Later ones are smoothed: a busy
        moment must not change reducers' shares.
        """
        if uplink and self.uplink_seen:
            self.uplink += RECENT * (uplink - self.uplink)
        elif uplink:
            self.uplink, self.uplink_seen = uplink, True

    def moved(self, numbers: Sequence[int]) -> None:
        """Take up a reported coordinate; one that is none changes nothing."""
        self.coordinate = Coordinate.of(numbers) or self.coordinate

    def heard(self, now: float) -> None:
        """Note that the volunteer sent a message, or that its stream is back."""
        self.broken_at, self.heard_at = None, now

    def holds(self, held: Sequence[Held], version: int) -> bool:
        """Whether `held` is all of its place at `version`."""
        blocks = range(*(self.place or (0, 0)))
        return [h.block for h in held] == list(blocks) and all(h.version == version for h in held)

    def has_room(self, place: Place) -> bool:
        """Whether `place` fits into what the volunteer offers, with a kind of offload that it allows."""
        return self.offered is None or choose(place.demand, self.offered).fits

    # ── transitions ─────────────────────────────────────────────────────────────────────────────────────────

    def rejoin(self) -> None:
        """Prepare again: another place, out of the step, or the run rolled back."""
        self.life_cycle = LifeCycle.JOINING

    def prepare(self) -> None:
        """Note that the graphs of the place are loaded, or that the state is not the current one any more."""
        self.life_cycle = LifeCycle.PREPARED

    def back_up(self, version: int, held: Sequence[Held], *, stored: bool) -> None:
        """Note that a backup holds `held`, the right states of `version`; `stored`: of a checkpoint."""
        self.life_cycle = LifeCycle.PREPARED
        if stored and self.place is not None:
            self.copied = self.place, version
        self.warm = version, {one.block: one.digest for one in held}
        self.worked = True

    def has(self, version: int) -> bool:
        """Whether the volunteer holds `version` as a backup."""
        return self.warm is not None and self.warm[0] == version

    def fetch(self) -> None:
        """Note that the volunteer was told to fetch the current version, or to report whether it holds it."""
        self.life_cycle = LifeCycle.SYNCING

    def work(self) -> None:
        """Note that the volunteer holds the current version."""
        self.life_cycle = LifeCycle.READY
        self.worked = True
        self.missed = 0

    def outdate(self) -> None:
        """Note that a version was made without the volunteer; one that held the version before missed it."""
        self.missed += self.life_cycle in (LifeCycle.SYNCING, LifeCycle.READY)
        if self.life_cycle is not LifeCycle.JOINING:
            self.life_cycle = LifeCycle.PREPARED
