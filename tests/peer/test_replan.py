"""From what volunteers say of themselves to who has which blocks from now on, and when to look."""

import asyncio
import itertools
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.log.moves import Move, MovePromise, MoveResult, demand
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.step_workload import of_manifest
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.bootstrap.state.context import whole_run
from hetpeer.bootstrap.state.membership import BlockDemand, Membership
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.dht.discovery import Advert, LinkNote, Roster
from hetpeer.peer.planning.asked_lines import Hope, Line, lines_known, settled
from hetpeer.peer.planning.device_files import devices_in
from hetpeer.peer.planning.replan import (
    HORIZON,
    RememberedLinks,
    Seating,
    _lines,
    comparable,
    proposal,
    stakes,
)
from hetpeer.peer.planning.swarm_inventory import inventory
from hetpeer.peer.reliable import plan_proposer
from hetpeer.peer.reliable.plan_proposer import PlanProposer
from hetpeer.peer.reliable.proposal_timing import AGAIN_S, LONGEST_S, SETTLED_S, ProposalTiming
from hetpeer.peer.simulate.sim_config import SwarmConfig
from hetpeer.peer.simulate.sim_numerics import Symbols
from hetpeer.stages.pipeline.place_memory import IN_FLIGHT, PlaceDemand
from hetpeer.stages.planning.swarms.incremental_plan import IncrementalPlanner
from hetpeer.stages.planning.swarms.stakes import Stakes
from tests.amounts import mostly_proof
from tests.bootstrap.engine import make_run

BLOCKS = 4
HALVES = ((0, 2), (2, 4))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Four blocks, in halves."""
    return make_run(tmp_path_factory.mktemp("replanning"))


def advert(flops_per_second: float, memory_bytes: int = 1 << 30) -> Advert:
    return Advert(
        role="volunteer", memory_bytes=memory_bytes, flops_per_second=flops_per_second, uplink=12.5e6
    )


def seating(**places: tuple[int, tuple[int, int]]) -> Seating:
    clusters = 1 + max(cluster for cluster, _ in places.values())
    return Seating(layouts=(HALVES,) * clusters, seats=places)


def asked(
    run: RunDirectory, adverts: dict[str, Advert], seats: Seating, looks: int = 2000
) -> Arrangement | None:
    left = iter(range(looks))
    return proposal(
        run.manifest, adverts, seats, Stakes(steps=1000), seed=1, on=lambda: next(left, None) is not None
    )


def test_who_is_left_takes_over_what_nobody_comes_for(run: RunDirectory) -> None:
    found = asked(run, {"a": advert(1e9)}, seating(a=(0, (0, 2))))
    assert found is not None
    assert found.seats == {"a": (0, (0, BLOCKS))}
    assert found.fault(BLOCKS) is None
    assert found.promise is not None
    assert (found.promise.before_s, found.promise.blocks) == (None, 2)


def test_slow_and_fast_change_their_shares(run: RunDirectory) -> None:
    """A hundred times slower with half of the blocks."""
    adverts = {"fast": advert(1e7), "slow": advert(1e5)}
    found = asked(run, adverts, seating(fast=(0, (0, 2)), slow=(0, (2, 4))))
    assert found is not None
    assert found.promise is not None
    assert found.promise.before_s is not None
    assert found.promise.after_s < found.promise.before_s
    assert found.seats.keys() == adverts.keys()
    _, (begin, end) = found.seats["fast"]
    assert end - begin >= 3
    assert found.fault(BLOCKS) is None


def test_whom_the_plan_spares_keeps_a_place(run: RunDirectory) -> None:
    """Nobody is sent away: who is too slow for a pipeline becomes a backup."""
    adverts = {"a": advert(1e7), "b": advert(1e7), "slow": advert(1e2)}
    seats = seating(a=(0, (0, 2)), slow=(0, (2, 4)), b=(1, (0, 2)))
    found = asked(run, adverts, seats)
    assert found is not None
    assert found.seats.keys() == adverts.keys()
    assert found.fault(BLOCKS) is None
    fast = [found.seats[peer] for peer in "ab"]
    covered = {block for _, place in fast for block in range(*place)}
    assert covered == set(range(BLOCKS))
    assert found.backups == {"slow"}


@pytest.mark.parametrize(("cut", "fetched"), [(1, 0), (3, 1)])
def test_whom_the_plan_spares_has_as_little_to_fetch_as_can_be(
    run: RunDirectory, cut: int, fetched: int
) -> None:
    """The usual cut has no place like its own: it gets the half in which most of its blocks are. What a
    backup fetches is none of what the move waits for.
    """
    uneven = ((0, cut), (cut, 4))
    seats = Seating(
        layouts=(uneven, uneven),
        seats={"a": (0, (0, cut)), "slow": (0, (cut, 4)), "b": (1, (0, cut))},
    )
    left = iter(range(2000))
    found = proposal(
        run.manifest.model_copy(update={"layouts": (HALVES,)}),
        {"a": advert(1e7), "b": advert(1e7), "slow": advert(1e2)},
        seats,
        Stakes(steps=1000),
        seed=1,
        on=lambda: next(left, None) is not None,
    )
    assert found is not None
    new = {
        peer: set(range(*place)).difference(range(*seats.seats[peer][1]))
        for peer, (_, place) in found.seats.items()
    }
    assert len(new["slow"]) == fetched
    assert found.promise is not None
    assert found.promise.blocks == sum(len(blocks) for peer, blocks in new.items() if peer != "slow")


def test_whom_the_plan_spares_gets_no_blocks_that_it_has_no_room_for(run: RunDirectory) -> None:
    uneven = ((0, 1), (1, 4))
    seats = Seating(
        layouts=(uneven, uneven),
        seats={"small": (0, (0, 1)), "a": (0, (1, 4)), "b": (1, (0, 1)), "c": (1, (1, 4))},
    )
    adverts = dict.fromkeys("ab", advert(1e7)) | {
        "c": advert(1e5),
        "small": advert(1e2, memory_bytes=500_000),
    }
    found = asked(run, adverts, seats)
    assert found is not None
    assert found.fault(BLOCKS) is None
    work = of_manifest(run.manifest, run.manifest.training.microbatches)
    needed = work.memory + IN_FLIGHT * work.kept
    assert needed[slice(*found.seats["small"][1])].sum() <= 500_000


@pytest.mark.parametrize(
    "absurd",
    [
        {"forward_s": 5e-324, "backward_s": 5e-324, "block_end": 2},
        {"uplink": 1e18},
        {"flops_per_second": 1e-320},
        {"flops_per_second": 1e18},
        {"links": (LinkNote(to="b", rate=1e-310, trip_s=1e18),)},
    ],
)
def test_what_nobody_can_be_does_not_keep_others_from_planning(
    run: RunDirectory, absurd: dict[str, Any]
) -> None:
    adverts = {"a": advert(1e9), "b": advert(1e9).model_copy(update=absurd)}
    asked(run, adverts, seating(a=(0, (0, 2)), b=(0, (2, 4))), looks=50)
    assert asked(run, {"b": adverts["b"]}, seating(b=(0, (0, 2)))) is not None


def test_nothing_is_proposed_for_a_swarm_that_is_well_off(run: RunDirectory) -> None:
    adverts = {"a": advert(1e9), "b": advert(1e9)}
    first = asked(run, adverts, seating(a=(0, (0, 2)), b=(0, (2, 4))))
    if first is not None:
        seats = Seating(
            layouts=tuple(tuple(layout) for layout in first.layouts),
            seats=first.seats,
            backups=first.backups,
        )
        assert asked(run, adverts, seats) is None


PEERS = tuple(f"QmVolunteer{number}" for number in range(8))


class World:
    """Eight that hold halves, in four clusters, and what lines between them really carry, which is known
    of those in use.
    """

    def __init__(self, run: RunDirectory, seed: int) -> None:
        random = np.random.default_rng(seed)
        training = run.manifest.training
        many = training.model_copy(update={"batch_size": 64 * training.batch_size})
        self.manifest = run.manifest.model_copy(update={"training": many})
        work = of_manifest(self.manifest, self.manifest.training.microbatches)
        each = work.memory + 3 * (work.kept + 4 * work.crossing.max())
        self.memory = int(1.1 * max(each[:2].sum(), each[2:].sum()))
        """Enough for half of the blocks, and not for all."""
        self.rates = {pair: float(random.lognormal(8.0, 2.0)) for pair in itertools.permutations(PEERS, 2)}
        self.flops = dict(zip(PEERS, random.uniform(1e6, 1e8, len(PEERS)).tolist(), strict=True))
        order = random.permutation(PEERS).tolist()
        self.seats = seating(**{peer: (n // 2, HALVES[n % 2]) for n, peer in enumerate(order)})
        self.moves: list[Move] = []

    def adverts(self, most: int = 4) -> dict[str, Advert]:
        """Each names its slowest lines in use: to who comes next, to who came before, and to whom it adds
        up with.
        """
        found = {}
        for peer, (cluster, (begin, end)) in self.seats.seats.items():
            met = [
                other
                for other, (theirs, (first, last)) in self.seats.seats.items()
                if other != peer and (most > 4 or theirs == cluster or (first < end and begin < last))
            ]
            slowest = sorted((self.rates[peer, other], other) for other in met)[:most]
            links = tuple(LinkNote(to=other[-8:], rate=rate, trip_s=0.02) for rate, other in slowest)
            fastest = max(rate for pair, rate in self.rates.items() if pair[0] == peer)
            own = advert(self.flops[peer], self.memory)
            found[peer] = own.model_copy(update={"links": links, "uplink": fastest})
        return found

    def step_s(self) -> float:
        """What a step really takes."""
        found = inventory(self.manifest, self.adverts(most=len(PEERS)))
        devices = devices_in(found.document(), "the truth").devices
        work = of_manifest(self.manifest, self.manifest.training.microbatches)
        working = self.seats.working
        held = [working[peer][1] if peer in working else (0, 0) for peer in found.peers]
        lines = _lines(self.seats, found.peers)
        return IncrementalPlanner(
            devices, work, held, lines, Stakes(steps=1), seed=0, measured=found.measured
        ).before_s

    def changed(self, remembered: RememberedLinks, seed: int, *, asks: bool) -> Arrangement | None:
        """The arrangement that is proposed now, and done; what came of the last one is known.

        `asks`: lines are measured before a move relies on them; otherwise nobody answers.
        """
        stakes, seeds = Stakes(steps=1000, measured_s=self.step_s(), demand=demand(self.moves, 0)), [seed]

        async def search(hope: Hope | None) -> Arrangement | None:
            left = iter(range(1000))
            seeds[0] += 1000
            return proposal(
                self.manifest,
                remembered(self.adverts()),
                self.seats,
                stakes,
                seed=seeds[0],
                on=lambda: next(left, None) is not None,
                hope=hope,
            )

        async def ask(lines: Collection[Line]) -> Collection[Line]:
            for pair in [*lines, *(line[::-1] for line in lines)] if asks else ():
                remembered.add(pair[0], LinkNote(to=pair[1][-8:], rate=self.rates[pair], trip_s=0.02))
            return lines if asks else ()

        found = asyncio.run(settled(search, lambda: lines_known(remembered(self.adverts())), ask, set()))
        if found is not None:
            layouts = tuple(tuple(layout) for layout in found.layouts)
            self.seats = Seating(layouts=layouts, seats=found.seats, backups=found.backups)
            assert found.promise is not None
            result = MoveResult(after_s=self.step_s(), moving_s=found.promise.moving_s)
            self.moves.append(Move(step=0, promise=found.promise, result=result))
        return found


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("seed", mostly_proof(range(6), range(1)))
def test_lines_that_nobody_knows_are_tried_a_few_times_and_then_all_stays(
    run: RunDirectory, seed: int, asks: bool
) -> None:
    """Lines differ a thousandfold. Only those in use are known, four of each peer, and what is asked for."""
    world, remembered = World(run, seed), RememberedLinks()
    begun, changes, looks = world.step_s(), 0, 12
    last = 0
    for look in range(looks):
        if world.changed(remembered, look, asks=asks) is not None:
            changes, last = changes + 1, look
    assert changes <= 6
    assert last < looks - 3
    assert world.step_s() <= begun


@pytest.mark.parametrize(
    "adverts", [{}, {"a": advert(1e9)}, {"a": advert(1e9), "b": Advert(role="volunteer")}]
)
def test_nothing_is_proposed_before_everybody_has_said_what_it_can_do(
    run: RunDirectory, adverts: dict[str, Advert]
) -> None:
    assert asked(run, adverts, seating(a=(0, (0, 2)), b=(0, (2, 4)))) is None


def test_a_seating_is_the_coordinators() -> None:
    cost = BlockDemand(elements=1, memory=PlaceDemand(activations=1), flops=1.0)
    members = Membership((HALVES,), [cost] * BLOCKS)
    for number, (place, worked) in enumerate(((None, True), ((2, 4), True), ((0, 2), False))):
        volunteer = VolunteerState(f"v{number}", 1, 0.0, cluster=0, place=place, worked=worked)
        members.volunteers[volunteer.peer] = volunteer
    assert Seating.of(members) == seating(v1=(0, (2, 4)))
    assert Seating.of(members, only_worked=False) == seating(v1=(0, (2, 4)), v2=(0, (0, 2)))


def test_somebody_who_comes_and_goes_every_25_seconds_does_not_put_off_the_search_for_ever() -> None:
    timing, here = ProposalTiming(), seating(a=(0, (0, 2)), b=(0, (2, 4)))
    more = seating(a=(0, (0, 2)), b=(0, (2, 4)), stranger=(1, (0, 2)))
    looked = [now for now in range(0, 1000, 5) if timing.is_due((here, more)[now // 25 % 2], float(now))]
    assert looked[0] <= LONGEST_S
    assert all(later - earlier <= AGAIN_S + LONGEST_S for earlier, later in itertools.pairwise(looked))


def test_it_is_calm_when_nobody_came_or_went_for_a_while() -> None:
    timing, here, fewer = ProposalTiming(), seating(a=(0, (0, 2)), b=(0, (2, 4))), seating(a=(0, (0, 2)))
    looks = itertools.count(100.0, 5.0)
    changes = [(here, 60), (fewer, 60), (here, 40)]
    due: list[tuple[int, float]] = []
    for which, (seats, times) in enumerate(changes):
        began = None
        for now in itertools.islice(looks, times):
            began = now if began is None else began
            if timing.is_due(seats, now):
                due.append((which, now - began))
    assert [one for one in due if one[0] == 0] == [
        (0, SETTLED_S),
        (0, SETTLED_S + AGAIN_S),
        (0, SETTLED_S + 2 * AGAIN_S),
    ]
    assert [one for one in due if one[0] == 2] == [(2, SETTLED_S), (2, SETTLED_S + AGAIN_S)]


def test_who_has_gone_is_missed_until_something_is_proposed() -> None:
    """Places that nobody has come for yet are no loss."""
    one, two = seating(a=(0, (0, 2))), seating(a=(0, (0, 2)), b=(0, (2, 4)))
    timing = ProposalTiming()
    missed = []
    for seats in (one, two, one, two):
        timing.is_due(seats, 0.0)
        missed.append(timing.lost)
    assert missed == [set(), set(), {0}, {0}]
    timing.proposed(0.0)
    assert not timing.lost


def test_who_leaves_a_cluster_that_was_never_whole_is_no_loss_nor_is_who_was_moved() -> None:
    front, back = (0, 2), (2, 4)
    filling = seating(a=(0, front), b=(0, back), c=(1, front))
    moved = seating(a=(0, front), b=(1, front), c=(0, back))
    timing = ProposalTiming()
    missed = []
    for seats in (
        filling,
        seating(a=(0, front), b=(0, back)),
        filling,
        seating(b=(0, back), c=(1, front)),
        filling,
        moved,
        seating(a=(0, front), c=(0, back)),
    ):
        timing.is_due(seats, 0.0)
        missed.append(timing.lost)
        timing.proposed(0.0)
    assert missed == [set(), set(), set(), {0}, set(), set(), set()]


def test_each_change_is_followed_by_a_longer_rest_until_somebody_comes_or_goes() -> None:
    one, other = seating(a=(0, (0, 2)), b=(0, (2, 4))), seating(a=(0, (2, 4)), b=(0, (0, 2)))
    timing, now, rests = ProposalTiming(), 0.0, []
    for seats in (one, other, one, other):
        timing.is_due(seats, now)
        begun = now
        while not timing.is_due(seats, now):
            now += 5.0
        rests.append(now - begun)
        timing.proposed(now)
    assert rests == [SETTLED_S, AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S]
    assert timing.changes == 4
    fewer = seating(a=(0, (2, 4)))
    assert not timing.is_due(fewer, now)
    assert timing.changes == 0
    assert timing.is_due(fewer, now + SETTLED_S)


def test_a_search_waits_until_enough_steps_were_measured_and_is_not_put_off_for_it() -> None:
    """Steps that begin after the swarm has changed are measured; somebody else who comes later restarts
    nothing.
    """
    one, two = seating(a=(0, (0, 2))), seating(a=(0, (0, 2)), b=(0, (2, 4)))
    timing, asked = ProposalTiming(), list[int]()

    def known(since: int) -> bool:
        asked.append(since)
        return len(asked) > 3

    assert not timing.is_due(one, 0.0, 7, known)
    assert not timing.is_due(two, 20.0, 8, known)
    assert asked == []
    due = [timing.is_due(two, 50.0 + 5.0 * look, 9, known) for look in range(5)]
    assert due == [False, False, False, True, False]
    assert asked == [7, 7, 7, 7]
    assert not timing.is_due(one, 200.0, 12, known)
    assert timing.is_due(one, 300.0, 14, known)
    assert timing.since == 12


def test_what_a_move_has_to_earn_follows_from_the_log() -> None:
    """Measured steps, the cost of moves, what they brought, and the steps that are left."""
    begun = [{"kind": "commit", "step": step, "seconds": 30.0 + step} for step in range(4)]
    fresh = History.of(begun)
    assert stakes(fresh, 10, 1) == Stakes(steps=5, measured_s=32.5)
    assert stakes(fresh, 1000, 1).steps == HORIZON
    assert stakes(fresh, 4, 1).steps == 0
    assert (comparable(fresh, 1), comparable(fresh, 2)) == (True, False)
    promised = {"before_s": 32.0, "after_s": 22.0, "moving_s": 10.0, "costs": 1.0, "blocks": 3}
    moving = [*begun, {"kind": "arranged", "layouts": [], "promise": promised}]
    assert not comparable(History.of(moving), 1)
    settled = [*moving, {"kind": "moved", "after_s": 27.0, "moving_s": 40.0, "why": ""}]
    assert comparable(History.of(settled), 1)
    assert stakes(History.of(settled), 10, 1) == Stakes(steps=5, measured_s=32.5, costs=4.0, demand=2.0)


def test_a_promise_is_made_by_the_step_that_was_measured(run: RunDirectory) -> None:
    """The model knows nothing of 3 s that each step takes longer: they stay. Late in a run all stays."""
    adverts = {"fast": advert(1e7), "slow": advert(1e5)}
    seats = seating(fast=(0, (0, 2)), slow=(0, (2, 4)))

    def promised(steps: int, measured_s: float | None) -> MovePromise | None:
        left = iter(range(500))
        found = proposal(
            run.manifest,
            adverts,
            seats,
            Stakes(steps=steps, measured_s=measured_s),
            seed=1,
            on=lambda: next(left, None) is not None,
        )
        return None if found is None else found.promise

    by_model = promised(1000, None)
    assert by_model is not None
    assert by_model.before_s is not None
    measured = promised(1000, by_model.before_s + 3.0)
    assert measured is not None
    assert measured.before_s == pytest.approx(by_model.before_s + 3.0)
    assert measured.after_s == pytest.approx(by_model.after_s + 3.0)
    halved = promised(1000, by_model.before_s / 2)
    assert halved is not None
    assert halved.after_s == pytest.approx(by_model.after_s / 2)
    assert promised(0, by_model.before_s) is None


def test_lines_that_are_not_used_any_more_are_remembered_as_long_as_both_are_there() -> None:
    remembered = RememberedLinks()
    slow, fast = LinkNote(to="QmPeerB"[-8:], rate=1e3), LinkNote(to="QmPeerC"[-8:], rate=1e6)
    three = dict.fromkeys(("QmPeerA", "QmPeerB", "QmPeerC"), advert(1e9))
    remembered({**three, "QmPeerA": three["QmPeerA"].model_copy(update={"links": (slow,)})})
    later = {**three, "QmPeerA": three["QmPeerA"].model_copy(update={"links": (fast,)})}
    assert set(remembered(later)["QmPeerA"].links) == {slow, fast}
    newer = slow.model_copy(update={"rate": 2e3})
    again = {**three, "QmPeerA": three["QmPeerA"].model_copy(update={"links": (newer,)})}
    assert set(remembered(again)["QmPeerA"].links) == {newer, fast}
    short = slow.model_copy(update={"rate": 1e3, "trip_s": 0.3, "activation_bytes": 100})
    again = {**three, "QmPeerA": three["QmPeerA"].model_copy(update={"links": (short,)})}
    assert set(remembered(again)["QmPeerA"].links) == {newer, fast}, "short bundles show less"
    del three["QmPeerB"]
    assert set(remembered(three)["QmPeerA"].links) == {fast}
    assert not remembered({"QmPeerB": advert(1e9)})["QmPeerB"].links


async def nothing_known(_lines: Collection[Line]) -> dict[tuple[str, str], LinkNote]:
    return {}


async def test_one_failed_look_is_not_the_last(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plan_proposer, "LOOK_S", 0.001)
    looked = asyncio.Event()

    class Failing(PlanProposer):
        looks = 0

        async def _look(self, service: CoordinatorService, core: Coordinator) -> None:
            self.looks += 1
            if self.looks == 1:
                raise LookupError(core.state.value)
            looked.set()

    config = SwarmConfig().coordinator(Symbols(BLOCKS))
    core = Coordinator(whole_run(config, History.of([])), 0.0)
    service = cast(
        "CoordinatorService",
        SimpleNamespace(core=core, halted=asyncio.get_running_loop().create_future()),
    )
    looking = asyncio.ensure_future(
        Failing(run.manifest, cast("Roster", None), lambda: service, nothing_known).look_forever()
    )
    await asyncio.wait_for(looked.wait(), 10.0)
    looking.cancel()
    assert "LookupError" in caplog.text


def test_what_was_moved_is_left_alone_until_it_is_measured_unless_somebody_goes() -> None:
    before, after = seating(a=(0, (0, 2)), b=(0, (2, 4))), seating(a=(0, (2, 4)), b=(0, (0, 2)))
    timing = ProposalTiming()
    assert not timing.is_due(before, 0.0)
    assert timing.is_due(before, SETTLED_S)
    timing.proposed(SETTLED_S)
    assert not timing.is_due(after, SETTLED_S + 10.0)
    assert not timing.is_due(after, 2 * SETTLED_S + 20.0)
    assert timing.is_due(after, SETTLED_S + AGAIN_S)
    fewer = seating(a=(0, (2, 4)))
    timing.proposed(200.0)
    assert not timing.is_due(fewer, 210.0)
    assert timing.is_due(fewer, 210.0 + SETTLED_S)
