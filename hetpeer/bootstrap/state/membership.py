"""Membership: volunteers as the coordinator sees them, their places, and the blocks that they hold.

Pure. What it knows of each volunteer is in volunteer_state.py. A place is a block range of one cluster;
clusters are copies of the model and may cut it differently. There is always one more cluster open than
volunteers fill, so a newcomer finds either a gap or a fresh copy to begin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hetpeer.averaging.messages import Place, Range, demand_fields
from hetpeer.bootstrap.state.reserved_seats import ReservedSeats
from hetpeer.bootstrap.state.volunteer_state import LifeCycle, VolunteerState
from hetpeer.stages.pipeline.place_memory import PlaceDemand
from hetpeer.stages.planning.swarms.plan_inputs import Compression

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
    clusters. `departures`: peer → how often it has left. With `only` there is that cluster alone; while it is
    `shared`, its places stay open and have any number of volunteers. `backups`: peers that keep a place and
    take part in no step (docs/planning.md, "Backups").
    """

    def __init__(
        self,
        layouts: Sequence[Sequence[Range]],
        costs: Sequence[BlockDemand],
        departures: Mapping[str, int] = MappingProxyType({}),
        only: int | None = None,
        arranged: Sequence[Sequence[Range]] = (),
        backups: Iterable[str] = (),
        *,
        shared: bool = False,
    ) -> None:
        self._only = only
        self.shared = shared
        self.backups = frozenset(backups)
        self._layouts = [tuple((b, e) for b, e in layout) for layout in layouts]
        self.arrange(arranged)
        self.reserved = ReservedSeats()
        self.blocks = len(costs)
        self.costs = costs
        self._departures = departures
        self.volunteers: dict[str, VolunteerState] = {}

    def arrange(self, layouts: Sequence[Sequence[Range]]) -> None:
        """Cut the first clusters like this from now on."""
        self._arranged = [tuple((b, e) for b, e in layout) for layout in layouts]

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
        reserved = self.reserved.closed_to(newcomer)
        present = (v for v in self.volunteers.values() if not (v.slow and yielding))
        taken = set() if self.shared else {(v.cluster, v.place) for v in present if v.place is not None}
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
        used = [v.cluster for v in self.volunteers.values()] + self.reserved.clusters
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
        others = (v for v in self.volunteers.values() if v is not volunteer and not self.shared)
        taken = {(v.cluster, v.place) for v in others}
        first = range(len(self.volunteers) + len(self._layouts) + len(self._arranged))
        clusters = first if self._only is None else (self._only,)
        for cluster in sorted(clusters, key=lambda cluster: self.reserved.rank(volunteer, (cluster, place))):
            if place in self.layout(cluster) and (cluster, place) not in taken:
                volunteer.cluster, volunteer.place = cluster, place
                return True
        return False

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
