"""Membership: volunteers as the coordinator sees them, their places, and the blocks that they hold.

Pure. Only this module sets `VolunteerState.life_cycle`; everybody else calls a transition by its name. A
place is a block range of one cluster; clusters are copies of the model and may cut it differently. There is
always one more cluster open than volunteers fill, so a newcomer finds either a gap or a fresh copy to begin.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from hetpeer.averaging.messages import Held, Hello, Place, Range, demand_fields
from hetpeer.stages.pipeline.place_memory import Offered, PlaceDemand, choose
from hetpeer.stages.planning.network_coordinates import Coordinate
from hetpeer.stages.planning.swarms.plan_inputs import Compression

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


PLAIN = Compression()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDemand:
    """Demand of a block on its holder: vector elements, memory, forward FLOPs of a microbatch."""

    elements: int
    memory: PlaceDemand
    flops: float


def is_cut(layout: Sequence[Range], blocks: int) -> bool:
    """Whether `layout` is a cut of this many blocks into ranges, in order and none of them empty."""
    begins, ends = [begin for begin, _ in layout], [end for _, end in layout]
    return [*begins, blocks] == [0, *ends] and all(begin < end for begin, end in layout)


class Membership:
    """The table of volunteers.

    `layouts[c % len]` is cluster c's cut of the blocks into ranges; `arranged` replaces it for the first
    clusters. `departures`: peer → how often it has left. With `only` there is that cluster alone. `backups`:
    peers that keep a place and take part in no step (docs/planning.md, "Backups").
    """

    def __init__(
        self,
        layouts: Sequence[Sequence[Range]],
        costs: Sequence[BlockDemand],
        departures: Mapping[str, int] = MappingProxyType({}),
        only: int | None = None,
        arranged: Sequence[Sequence[Range]] = (),
        backups: Iterable[str] = (),
    ) -> None:
        self._only = only
        self.backups = frozenset(backups)
        self._layouts = [tuple((b, e) for b, e in layout) for layout in layouts]
        self.arrange(arranged)
        self._reserved: frozenset[tuple[int, Range]] = frozenset()
        self.blocks = len(costs)
        self.costs = costs
        self._departures = departures
        self.volunteers: dict[str, VolunteerState] = {}

    def arrange(self, layouts: Sequence[Sequence[Range]]) -> None:
        """Cut the first clusters like this from now on."""
        self._arranged = [tuple((b, e) for b, e in layout) for layout in layouts]

    def reserve(self, places: Collection[tuple[int, Range]]) -> None:
        """Keep these places, (cluster, blocks), for the volunteers for which they are planned."""
        self._reserved = frozenset(places)

    def recut(self, layout: Sequence[Range]) -> None:
        """Cut the one cluster that is here like this from now on."""
        self._layouts = [tuple(layout)]

    def layout(self, cluster: int) -> tuple[Range, ...]:
        """Block ranges of `cluster`."""
        if cluster < len(self._arranged):
            return self._arranged[cluster]
        return self._layouts[cluster % len(self._layouts)]

    def places(self, newcomer: VolunteerState | None = None, *, yielding: bool = False) -> tuple[Place, ...]:
        """Places up to the first empty cluster, included; `yielding`: slow volunteers' places are open.

        Reserved ones are closed to all but the `newcomer` for which they are planned.
        """
        planned = None if newcomer is None else newcomer.planned
        reserved = self._reserved - {planned}
        present = (v for v in self.volunteers.values() if not (v.slow and yielding))
        taken = {(v.cluster, v.place) for v in present if v.place is not None}
        held: list[list[str]] = [[] for _ in range(self.blocks)]
        for volunteer in self.volunteers.values():
            for block in range(*(volunteer.place or (0, 0))) if not volunteer.slow else ():
                held[block].append(volunteer.peer)
        return tuple(
            self._place(cluster, place, (cluster, place) not in taken | reserved, held)
            for cluster in self._clusters()
            for place in self.layout(cluster)
        )

    def _clusters(self) -> Iterable[int]:
        if self._only is not None:
            return (self._only,)
        used = [v.cluster for v in self.volunteers.values()] + [cluster for cluster, _ in self._reserved]
        return range(max(used, default=-1) + 2)

    def place_at(self, seat: tuple[int, Range]) -> Place:
        """The place of a cluster as if nobody were here."""
        return self._place(*seat, True, [[] for _ in range(self.blocks)])

    def _place(self, cluster: int, place: Range, is_open: bool, held: Sequence[Sequence[str]]) -> Place:
        """A place as volunteers see it; `held`: block → its holders."""
        costs = self.costs[place[0] : place[1]]
        holders = min(map(len, held[place[0] : place[1]]))
        least = [peers for peers in held[place[0] : place[1]] if len(peers) == holders]
        return Place(
            cluster=cluster,
            begin=place[0],
            end=place[1],
            **demand_fields(PlaceDemand.of_all([cost.memory for cost in costs])),
            flops=sum(cost.flops for cost in costs),
            holders=holders,
            departures=max(sum(self._departures.get(peer, 0) for peer in peers) for peers in least),
            open=is_open,
        )

    def claim(self, volunteer: VolunteerState, cluster: int, place: Range, *, yielding: bool = False) -> bool:
        """Give the place to `volunteer` if it is open; `yielding` as in `places`."""
        for offered in self.places(volunteer, yielding=yielding):
            if offered.open and (offered.cluster, (offered.begin, offered.end)) == (cluster, place):
                volunteer.cluster, volunteer.place = cluster, place
                return True
        return False

    def settle(self, volunteer: VolunteerState) -> None:
        """Give `volunteer` an open place of the present layouts, unless nobody else has the one it has.

        It gets one that fits its memory, if there is any; among these the one with the fewest holders.
        """
        others = {(v.cluster, v.place) for v in self.volunteers.values() if v is not volunteer}
        if volunteer.place in self.layout(volunteer.cluster) and (
            (volunteer.cluster, volunteer.place) not in others
        ):
            return
        volunteer.place = None
        places = [place for place in self.places() if place.open]
        best = min(places, key=lambda place: (not volunteer.has_room(place), place.holders, place.cluster))
        volunteer.cluster, volunteer.place = best.cluster, (best.begin, best.end)

    def adopt(self, volunteer: VolunteerState, place: Range) -> bool:
        """Give a place to a holder that outlived the last coordinator: first cluster where its blocks fit.

        Its own seat comes first, then places that are not reserved. A state that is there counts for more
        than a reservation.
        """
        if not 0 <= place[0] < place[1] <= self.blocks:
            return False
        taken = {(v.cluster, v.place) for v in self.volunteers.values() if v is not volunteer}
        first = range(len(self.volunteers) + len(self._layouts) + len(self._arranged))
        clusters = first if self._only is None else (self._only,)
        for cluster in sorted(clusters, key=lambda cluster: self._is_for_another(volunteer, cluster, place)):
            if place in self.layout(cluster) and (cluster, place) not in taken:
                volunteer.cluster, volunteer.place = cluster, place
                return True
        return False

    def _is_for_another(self, volunteer: VolunteerState, cluster: int, place: Range) -> int:
        """0: its own seat, 1: nobody's, 2: one that is reserved for another volunteer."""
        seat = (cluster, place)
        return 0 if seat == volunteer.planned else 2 if seat in self._reserved else 1

    def move_redundant(self) -> VolunteerState | None:
        """Move a redundant volunteer to an open place whose blocks nobody has, and return it; else None."""
        spare = self.spare()
        if spare is None:
            return None
        volunteer, place = spare
        volunteer.cluster, volunteer.place = place.cluster, (place.begin, place.end)
        return volunteer

    def spare(self) -> tuple[VolunteerState, Place] | None:
        """A volunteer whose blocks others hold too; an open place without holders that fits its memory."""
        for place in self.places():
            if not place.open or place.holders:
                continue
            for volunteer in sorted(self.volunteers.values(), key=self._spared_first):
                seated = volunteer.place is not None and self._redundant(volunteer)
                if seated and volunteer.has_room(place):
                    return volunteer, place
        return None

    def _spared_first(self, volunteer: VolunteerState) -> tuple[bool, int, str]:
        return volunteer.peer not in self.backups, -volunteer.cluster, volunteer.peer

    def _redundant(self, volunteer: VolunteerState) -> bool:
        others = {
            v.peer: v.place
            for v in self.volunteers.values()
            if v is not volunteer and v.place is not None and not v.slow
        }
        missing = set(self.uncovered(others))
        return volunteer.place is not None and not missing.intersection(range(*volunteer.place))

    def roster(self) -> dict[str, Range]:
        """Volunteer that holds the current version → its blocks."""
        return {
            v.peer: v.place
            for v in self.volunteers.values()
            if v.life_cycle is LifeCycle.READY and v.place is not None
        }

    def held_only_by(self, volunteers: Iterable[VolunteerState]) -> list[int]:
        """Blocks that have ready holders, all of them among `volunteers`."""
        leaving = {v.peer for v in volunteers}
        return [n for n in range(self.blocks) if (h := set(self.holders(n))) and h <= leaving]

    def outdate(self, roster: Collection[str]) -> None:
        """Note that `roster` made a new version: others are outdated, and no digests of it are known yet."""
        for volunteer in self.volunteers.values():
            volunteer.digests, volunteer.witness = {}, volunteer.peer in roster
            if volunteer.peer not in roster:
                volunteer.outdate()

    def start_over(self, *, same: bool) -> None:
        """Everybody prepares again; `same`: from the version that holds now, so that backups keep theirs."""
        for volunteer in self.volunteers.values():
            volunteer.digests = {}
            volunteer.warm = volunteer.warm if same else None
            volunteer.rejoin()

    def holders(self, block: int) -> list[str]:
        """Ready holders of `block`, in a fixed order."""
        return sorted(peer for peer, (b, e) in self.roster().items() if b <= block < e)

    def uncovered(self, roster: Mapping[str, Range] | None = None) -> list[int]:
        """Blocks that no volunteer of `roster` (default: all ready ones) holds."""
        ranges = (self.roster() if roster is None else roster).values()
        return [n for n in range(self.blocks) if not any(b <= n < e for b, e in ranges)]

    def kept(self, version: int) -> set[int]:
        """Blocks of which a backup holds `version`."""
        backups = [v for v in self.volunteers.values() if v.peer in self.backups and v.has(version)]
        return {block for backup in backups for block in range(*(backup.place or (0, 0)))}

    def standing_by(self, version: int) -> set[int]:
        """Blocks of which a backup has the checkpoint of `version`, in its worker or on its disk."""
        backups = [v for v in self.volunteers.values() if v.peer in self.backups and v.place is not None]
        ready = [v.place for v in backups if v.place and (v.has(version) or v.copied == (v.place, version))]
        return {block for place in ready for block in range(*place)}

    def needed_backups(self, version: int) -> list[VolunteerState]:
        """Backups without which a block has no volunteer: one for each, rather one that has `version`."""
        present = [v for v in self.volunteers.values() if v.place is not None and not v.slow]
        others = {v.peer: v.place for v in present if v.place is not None and v.peer not in self.backups}
        needed, found = set(self.uncovered(others)), list[VolunteerState]()
        backups = [v for v in present if v.peer in self.backups]
        for backup in sorted(backups, key=lambda v: (not v.has(version), v.peer)):
            blocks = set(range(*(backup.place or (0, 0))))
            if not needed.isdisjoint(blocks):
                found.append(backup)
                needed -= blocks
        return found

    def leaving(self) -> list[VolunteerState]:
        """Volunteers that said farewell and stay until the state that they alone hold is stored."""
        return [v for v in self.volunteers.values() if v.leaves_by is not None]

    def is_last_holder(self, volunteer: VolunteerState) -> bool:
        """Whether `volunteer` may hold a block of the current version that no staying volunteer holds."""
        if not volunteer.worked or volunteer.life_cycle not in (LifeCycle.READY, LifeCycle.SYNCING):
            return False
        roster = self.roster().items()
        staying = {p: place for p, place in roster if self.volunteers[p].leaves_by is None}
        return not set(self.uncovered(staying)).isdisjoint(range(*(volunteer.place or (0, 0))))

    def speak(self, version: int, peers: Iterable[str]) -> bool:
        """Whether all of `peers` speak that version of the protocol."""
        known = self.volunteers
        return all(peer in known and known[peer].wire_version >= version for peer in peers)

    def ready(self) -> list[VolunteerState]:
        """Volunteers that hold the current version."""
        return [self.volunteers[peer] for peer in self.roster()]
