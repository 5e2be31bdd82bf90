"""Arrival orders: what a step takes once eight volunteers have come one after the other, and been moved.

DT-FM's eight regions of the world, one volunteer in each, all equally fast; a run of eight stages. They come
in six orders, and choose their places as the coordinator ranks them. Then the live planner looks again and
again, as often as it finds something. It knows what volunteers say: the rate of their lines that carried
something (the four slowest at most), what a probe found before there was any, and network coordinates, after
as many pings as in two minutes. It has the lines measured that a move relies on. Each plan is priced with all
lines as they are, and compared with the best plan of a search that knows them all.

`as they came`: places in the order of arrival, nobody ranked, nobody moved. Everything is simulated by the
planner's own model of a step, so there is no noise, and no time is measured (`benchmarks.eight` has real
processes).

    python -m benchmarks.arrivals
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.swarm import Model, make_run
from hetpeer.averaging.member.position import choose_place
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.log.moves import Move, MoveResult, demand
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.bootstrap.run.step_workload import of_manifest
from hetpeer.bootstrap.state.core_config import coordinator_config
from hetpeer.bootstrap.state.membership import Membership
from hetpeer.bootstrap.state.step_time_placement import StepTime
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.dht.discovery import MAX_LINKS, Advert, LinkNote
from hetpeer.peer.planning.asked_lines import HOPES, TIMES, Hope, Line, lines_known, settled
from hetpeer.peer.planning.replan import HORIZON, RememberedLinks, Seating, proposal
from hetpeer.peer.transport.uplink import SEVERAL
from hetpeer.stages.pipeline.place_memory import Offered
from hetpeer.stages.planning.network_coordinates import OwnCoordinate
from hetpeer.stages.planning.swarms.incremental_plan import IncrementalPlanner
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand
from hetpeer.stages.planning.swarms.plan_search import PlanSearch
from hetpeer.stages.planning.swarms.stakes import Stakes
from tests.wanlab.lab import MATRICES

REGIONS = json.loads((MATRICES / "regions.json").read_text())
PEERS = [f"Qm{name:1>9}" for name in REGIONS["names"]]
FLOPS = 1e12
ROOM = 1.2
"""Memory of each, as a multiple of what the largest of eight stages takes."""
PROBED = 3
"""Peers that a newcomer probes: the reliable one in Oregon, and two volunteers."""
LOOKS = 3000
"""Plans that a search of the live planner tries, about as many as in its two seconds."""
KNOWING = 60_000
ROUNDS = 24
"""Pings of each before the first search."""
SEARCHES = 3
"""Searches without a result after which a swarm has settled."""
MOST_SEARCHES = TIMES + len(HOPES)
"""Searches of one look."""
STEPS = 20
"""Steps between two searches."""
SETTLED, BETTER = 1.10, 1.5
"""Goals: a step over that of the plan with all lines known, in every order; as they came over ours."""


class World:
    """The true lines of the regions, and the work of a step of `run`."""

    def __init__(self, run: RunDirectory) -> None:
        count, manifest = len(PEERS), run.manifest
        self.run = run
        self.work: StepDemand = of_manifest(manifest, manifest.training.microbatches)
        stages = manifest.layouts[0]
        self.memory = int(
            ROOM
            * max(
                self.work.memory[begin:end].sum() + (2 * later + 1) * self.work.kept[begin:end].sum()
                for later, (begin, end) in enumerate(reversed(stages))
            )
        )
        """Bytes that each offers: enough for one of the eight stages, and not for two."""
        self.devices = Devices(
            flops=np.full(count, FLOPS),
            memory=np.full(count, float(self.memory)),
            uplink=np.full(count, np.inf),
            latency=np.array(REGIONS["latency_ms"]) / 1e3,
            bandwidth=np.array(REGIONS["bandwidth_mbps"]) * 1e6 / 8,
        )

    def best_s(self, seed: int) -> float:
        """Seconds of a step with the best plan found knowing all lines."""
        found = PlanSearch(self.devices, self.work, seed).run(limited(KNOWING))
        assert found is not None
        return found.best.total_s

    def step_s(self, members: Membership) -> float:
        """Seconds of a step of the swarm at its present places."""
        seated = {v.peer: v for v in members.volunteers.values()}
        held = [seated[peer].place or (0, 0) for peer in PEERS]
        taken = {(v.cluster, v.place): PEERS.index(v.peer) for v in seated.values()}
        clusters = 1 + max(v.cluster for v in seated.values())
        lines = [[(taken.get((c, place)), place) for place in members.layout(c)] for c in range(clusters)]
        return IncrementalPlanner(
            self.devices, self.work, held, lines, Stakes(steps=HORIZON), seed=0
        ).before_s

    def coordinates(self, seed: int) -> dict[str, tuple[int, ...]]:
        """Coordinates of all, after ROUNDS pings of each to others at random."""
        random = np.random.default_rng(seed)
        owns = [OwnCoordinate(peer) for peer in PEERS]
        for _ in range(ROUNDS):
            said = [own.coordinate for own in owns]
            for number, own in enumerate(owns):
                other = int(random.choice([n for n in range(len(PEERS)) if n != number]))
                own.pinged(PEERS[other], 2 * float(self.devices.latency[number, other]), said[other])
                own.heard(dict(zip(PEERS, said, strict=True)))
                own.move()
        return {peer: own.coordinate.numbers() for peer, own in zip(PEERS, owns, strict=True)}

    def probed(self, peer: str, there: Sequence[str]) -> float:
        """Bytes/s that a newcomer's probe finds: all lines at once to those whom it probes."""
        partners = [0, *(PEERS.index(other) for other in there)][:PROBED]
        own = PEERS.index(peer)
        return float(self.devices.bandwidth[own, [other for other in partners if other != own]].sum())


def limited(looks: int) -> Callable[[], bool]:
    """True as often as that."""
    left = iter(range(looks))
    return lambda: next(left, None) is not None


class Arriving:
    """A swarm of `world` into which volunteers come in an order; `ranked`: the coordinator ranks places."""

    def __init__(self, world: World, *, ranked: bool) -> None:
        self._world, self._ranked = world, ranked
        config = coordinator_config(world.run)
        self.members = Membership(config.layouts, config.costs)
        self._remembered = RememberedLinks()
        self._coordinates: dict[str, tuple[int, ...]] = {}
        self.moves: list[Move] = []
        self.asked = 0
        """Lines that were measured for a move."""

    def arrive(self, peer: str) -> None:
        """One more volunteer chooses its place."""
        there = sorted(self.members.volunteers.values(), key=lambda volunteer: volunteer.peer)
        newcomer = VolunteerState(
            peer,
            1,
            0.0,
            flops_per_second=FLOPS,
            product_flops=FLOPS,
            offered=Offered(device=self._world.memory),
            uplink=self._world.probed(peer, [volunteer.peer for volunteer in there]),
        )
        places = self.members.places()
        if self._ranked:
            ranks = StepTime().ranks(places, newcomer, there, self._world.work)
            places = tuple(
                place.model_copy(update={"rank": rank}) for place, rank in zip(places, ranks, strict=True)
            )
        place = choose_place(places, Offered(device=self._world.memory))
        self.members.volunteers[peer] = newcomer
        assert self.members.claim(newcomer, place.cluster, (place.begin, place.end))
        self._work()

    def settle(self, seed: int) -> None:
        """Have the live planner look until it finds nothing any more."""
        self._coordinates = self._world.coordinates(seed)
        quiet = step = 0
        while quiet < SEARCHES:
            step, before_s = step + STEPS, self._world.step_s(self.members)
            stakes = Stakes(steps=HORIZON, measured_s=before_s, demand=demand(self.moves, step))
            seeds = itertools.count(seed + step * MOST_SEARCHES)
            found = asyncio.run(
                settled(
                    lambda hope: self._searched(stakes, next(seeds), hope),  # noqa: B023
                    lambda: lines_known(self._remembered(self._adverts())),
                    self._measured,
                    set(),
                )
            )
            if found is None:
                quiet += 1
                continue
            quiet = 0
            self.members.arrange(found.layouts)
            for peer, (cluster, place) in found.seats.items():
                self.members.volunteers[peer].cluster = cluster
                self.members.volunteers[peer].place = place
            self.members.backups = found.backups
            self._work()
            assert found.promise is not None
            result = MoveResult(after_s=self._world.step_s(self.members), moving_s=found.promise.moving_s)
            self.moves.append(Move(step=step, promise=found.promise, result=result))

    async def _searched(self, stakes: Stakes, seed: int, hope: Hope | None) -> Arrangement | None:
        return proposal(
            self._world.run.manifest,
            self._remembered(self._adverts()),
            Seating.of(self.members, only_worked=False),
            stakes,
            seed=seed,
            on=limited(LOOKS),
            hope=hope,
        )

    async def _measured(self, lines: Collection[Line]) -> Collection[Line]:
        """All of `lines`, measured by the volunteers at their ends."""
        self.asked += len(lines)
        for one, other in lines:
            for sender, to in ((one, other), (other, one)):
                self._remembered.add(sender, self._note(sender, to))
        return lines

    def _note(self, sender: str, to: str) -> LinkNote:
        trip_s = 2 * float(self._world.devices.latency[PEERS.index(sender), PEERS.index(to)])
        return LinkNote(to=to[-8:], rate=self._rate(sender, to), trip_s=trip_s)

    def _used(self, volunteer: VolunteerState) -> list[VolunteerState]:
        """Volunteers to which it sends: the next and the one before in its cluster."""
        line = sorted(
            (v for v in self.members.volunteers.values() if v.cluster == volunteer.cluster),
            key=lambda v: v.place or (0, 0),
        )
        pairs = [*pairwise(line), *pairwise(reversed(line))]
        return [
            to for sender, to in pairs
            if sender is volunteer and set(sender.place or ()) & set(to.place or ())
        ]  # fmt: skip

    def _rate(self, sender: str, to: str) -> float:
        return float(self._world.devices.bandwidth[PEERS.index(sender), PEERS.index(to)])

    def _work(self) -> None:
        """All have trained at their places for STEPS: the coordinator knows computing times, lines in use,
        and uplinks as far as they carried several lines at once.
        """
        crossing = self._world.work.crossing
        for volunteer in self.members.volunteers.values():
            begin, end = volunteer.place or (0, 0)
            flops = self._world.work.flops[begin:end].sum()
            volunteer.computing = float(self._world.work.computed * flops) / FLOPS
            volunteer.links = {
                to.peer: float(crossing[end if (to.place or (0, 0))[0] == end else begin])
                / self._rate(volunteer.peer, to.peer)
                for to in self._used(volunteer)
            }
            if len(volunteer.links) >= SEVERAL:
                for _ in range(STEPS):
                    volunteer.measured(sum(self._rate(volunteer.peer, to) for to in volunteer.links))

    def _adverts(self) -> dict[str, Advert]:
        """Adverts of all volunteers."""
        found = {}
        for peer, volunteer in self.members.volunteers.items():
            begin, end = volunteer.place or (0, 0)
            slowest = sorted(volunteer.links, key=lambda to: self._rate(peer, to))
            found[peer] = Advert(
                role="volunteer",
                block_begin=begin,
                block_end=end,
                memory_bytes=self._world.memory,
                flops_per_second=FLOPS,
                product_flops=FLOPS,
                uplink=volunteer.uplink,
                coordinate=self._coordinates[peer],
                links=tuple(self._note(peer, to) for to in slowest[:MAX_LINKS]),
            )
        return found


def orders(seed: int) -> list[list[str]]:
    """Six orders: as DT-FM lists the regions, the other way round, and four at random."""
    random = np.random.default_rng(seed)
    return [PEERS, PEERS[::-1], *([PEERS[n] for n in random.permutation(len(PEERS))] for _ in range(4))]


def measure(world: World, order: Sequence[str], best_s: float, seed: int) -> dict[str, Any]:
    """Steps of one order, as shares of the best."""
    came, ours = (Arriving(world, ranked=ranked) for ranked in (False, True))
    for peer in order:
        came.arrive(peer)
        ours.arrive(peer)
    ranked_s = world.step_s(ours.members)
    ours.settle(seed)
    steps = {
        "as_they_came": world.step_s(came.members),
        "ranked": ranked_s,
        "settled": world.step_s(ours.members),
    }
    return {
        "order": [peer.removeprefix("Qm").lstrip("1") for peer in order],
        **{name: step_s / best_s for name, step_s in steps.items()},
        "moves": len(ours.moves),
        "lines_asked": ours.asked,
        "lines": len(PEERS) * (len(PEERS) - 1) // 2,
    }


def show(figures: dict[str, Any]) -> None:
    print(f"a step with all lines known: {figures['best_s']:.2f} s; as a multiple of that:")
    for one in figures["orders"]:
        print(
            f"  {one['as_they_came']:5.2f} as they came, {one['ranked']:5.2f} ranked,"
            f" {one['settled']:5.2f} settled after {one['moves']} moves, {one['lines_asked']} of"
            f" {one['lines']} lines asked for: {', '.join(one['order'])}"
        )
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--microbatch-size", type=int, default=1)
    options = parser.parse_args()
    training = TrainingSettings(
        steps=1000,
        batch_size=options.microbatches * options.microbatch_size,
        microbatch_size=options.microbatch_size,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = Model(width=options.width, layers=len(PEERS), heads=8)
        world = World(make_run(Path(folder), model, len(PEERS), training, options.seed))
    best_s = world.best_s(options.seed)
    found = [measure(world, order, best_s, options.seed) for order in orders(options.seed)]
    better = statistics.median(one["as_they_came"] / one["settled"] for one in found)
    goals = {
        f"a step at most {SETTLED} of that with all lines known, in every order": all(
            one["settled"] <= SETTLED for one in found
        ),
        f"as they came takes at least {BETTER} times as long in the middle": better >= BETTER,
    }
    figures = {
        "options": vars(options),
        "best_s": best_s,
        "orders": found,
        "as_they_came_over_settled": better,
        "goals": goals,
        "met": all(goals.values()),
    }
    return report.finish("arrivals", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
