"""Ranking of open places for a newcomer."""

import random
import statistics
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.averaging import messages as m
from hetpeer.averaging.member.position import choose_place
from hetpeer.bootstrap.state.membership import BlockDemand, Membership
from hetpeer.bootstrap.state.placement_policies import is_spared, ranked
from hetpeer.bootstrap.state.step_time_placement import MOST
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.peer.simulate.network.sim_uplinks import SimHardware
from hetpeer.stages.pipeline.place_memory import Offered, PlaceDemand
from hetpeer.stages.planning.network_coordinates import Coordinate
from hetpeer.stages.planning.swarms.current_step_time import as_it_is
from hetpeer.stages.planning.swarms.plan_inputs import LATENCY_S, Devices, StepDemand
from tests.bootstrap.court import Court
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage

MICROBATCHES = 32
TERA, MEGA = 1e12, 1e6


def asks(flops, crossing=(), reduced=MEGA):
    """A block for each number of TFLOPs; `crossing`: MB between them."""
    count = len(flops)
    inner = crossing or (0.01,) * (count - 1)
    return StepDemand(
        flops=TERA * np.array(flops, float),
        constants=np.ones(count),
        kept=np.ones(count),
        crossing=MEGA * np.array([0.0, *inner, 0.0]),
        reduced=np.full(count, float(reduced)),
        state=np.ones(count),
        microbatches=MICROBATCHES,
    )


AMPLE = Offered(device=sys.maxsize)


def singles(count):
    """Every block is a place."""
    return tuple((block, block + 1) for block in range(count))


def swarm(work, *holders, memory=1):
    """A table with `holders`: (block, TFLOP/s, other facts)."""
    costs = [
        BlockDemand(elements=1, memory=PlaceDemand(activations=memory * (block + 1)), flops=f)
        for block, f in enumerate(work.flops)
    ]
    book = Membership((singles(len(work)),), costs)
    for number, (block, tflops, facts) in enumerate(holders):
        volunteer = VolunteerState(f"v{number:02}", 1, 0.0, flops_per_second=TERA * tflops, **facts)
        cluster = next(p.cluster for p in book.places() if p.open and p.begin == block)
        book.volunteers[volunteer.peer] = volunteer
        assert book.claim(volunteer, cluster, (block, block + 1))
    return book


def newcomer(tflops=1.0, **facts):
    return VolunteerState("zoe", 1, 0.0, flops_per_second=TERA * tflops, **facts)


def chosen(book, who, work, policy="step-time"):
    """The block that `who` chooses."""
    return choose_place(ranked(book, who, work, policy), who.offered or AMPLE).begin


def test_by_holders_alone_all_places_are_alike():
    work = asks([1, 1, 1])
    book = swarm(work, (0, 1.0, {}), (1, 0.2, {}), (2, 1.0, {}))
    assert {place.rank for place in ranked(book, newcomer(), work, "holders")} == {0}
    assert ranked(book, newcomer(), None) == book.places()


def test_of_missing_blocks_a_fast_machine_takes_the_heavy_ones_and_a_slow_one_the_light():
    work = asks([2, 6, 2])
    book = swarm(work, (0, 2.0, {}))
    assert choose_place(book.places(), AMPLE).begin == 2  # the largest, by memory
    assert chosen(book, newcomer(6.0), work) == 1
    assert chosen(book, newcomer(1.0), work) == 2


def test_a_slow_uplink_keeps_to_where_little_crosses():
    work = asks([1, 1, 1, 1], crossing=(0.01, 8.0, 8.0))
    book = swarm(work, (1, 1.0, {"uplink": 100 * MEGA}), (2, 1.0, {"uplink": 100 * MEGA}))
    assert choose_place(book.places(), AMPLE).begin == 3
    assert chosen(book, newcomer(uplink=MEGA), work) == 0
    assert chosen(book, newcomer(uplink=100 * MEGA), work) == 3  # nothing speaks against the largest


def test_where_all_blocks_are_held_help_goes_where_a_step_waits():
    work = asks([1, 1, 1])
    book = swarm(work, (0, 1.0, {}), (1, 0.2, {}), (2, 1.0, {}))
    assert chosen(book, newcomer(), work) == 1


def test_of_several_that_a_step_waits_for_alike_one_is_helped_and_no_idle_one():
    """One more machine makes no step shorter then."""
    work = asks([1, 1, 1])
    book = swarm(work, (0, 0.1, {}), (1, 0.1, {}), (2, 5.0, {}))
    assert choose_place(book.places(), AMPLE).begin == 2
    assert chosen(book, newcomer(), work) == 1
    ranks = {place.begin: place.rank for place in ranked(book, newcomer(), work) if place.open}
    assert ranks == {0: 0, 1: 0, 2: 1}


def test_sums_over_a_slow_uplink_count_too():
    """Its share of the reduce takes longer than it saves at the slower block."""
    work = replace(asks([1.0, 1.2]), reduced=np.array([MEGA, 2000 * MEGA]))
    book = swarm(work, (0, 1.0, {"uplink": 100 * MEGA}), (1, 1.0, {"uplink": 100 * MEGA}))
    assert chosen(book, newcomer(uplink=10 * MEGA), work) == 0
    assert chosen(book, newcomer(), replace(work, reduced=np.full(2, MEGA))) == 1


def test_what_training_has_shown_counts_more_than_what_was_said():
    work = asks([1, 1, 1])
    slow = {"computing": 30.0}
    book = swarm(work, (0, 9.0, slow), (1, 1.0, {}), (2, 1.0, {}))
    assert chosen(book, newcomer(), work) == 0
    wide, line = {"uplink": 100 * MEGA}, {"v01": 60.0}  # seconds of a microbatch's bundle
    book = swarm(work, (0, 1.0, wide), (1, 1.0, wide), (2, 1.0, wide))
    assert chosen(book, newcomer(**wide), work) == 2
    book = swarm(work, (0, 1.0, wide | {"links": line}), (1, 1.0, wide), (2, 1.0, wide))
    assert chosen(book, newcomer(**wide), work) == 0  # another volunteer waits for that link


def test_who_has_only_multiplied_matrices_is_taken_to_fall_behind_as_others_do():
    work = asks([2, 6, 2])
    book = swarm(work, (0, 2.0, {"product_flops": 20 * TERA}))
    said = newcomer(20.0, product_flops=20 * TERA)
    ranks = {place.rank for place in ranked(book, said, work) if not place.holders}
    assert ranks == {0}  # a machine like the other one: 2 TFLOP/s
    assert chosen(book, newcomer(60.0, product_flops=60 * TERA), work) == 1
    assert chosen(book, newcomer(10.0, product_flops=10 * TERA), work) == 2


def test_a_place_without_a_holder_comes_first_and_one_that_does_not_fit_never():
    work = asks([9, 9, 1])
    book = swarm(work, (0, 0.1, {}), (1, 1.0, {}), memory=10)
    assert chosen(book, newcomer(9.0), work) == 2
    book = swarm(work, (0, 9.0, {}), (1, 0.1, {}), (2, 0.1, {}), memory=10)
    assert chosen(book, newcomer(9.0, offered=Offered(device=30)), work) == 1
    assert chosen(book, newcomer(9.0, offered=Offered(device=10)), work) == 0


def test_a_holder_that_never_worked_holds_nothing():
    work = asks([1, 1, 1])
    book = swarm(work, (0, 1.0, {}), (1, 1.0, {}), (2, 1.0, {}))
    book.volunteers["v01"].slow = True
    assert chosen(book, newcomer(), work) == 1


@pytest.mark.parametrize(
    ("book", "who", "work"),
    [
        (swarm(asks([2, 6, 2])), newcomer(), asks([2, 6, 2])),
        (swarm(asks([2, 6, 2]), (0, 1.0, {})), newcomer(), None),
        (swarm(asks([2, 6, 2]), (0, 1.0, {})), newcomer(0.0), asks([2, 6, 2])),
        (swarm(asks([2, 6, 2]), (0, 0.0, {})), newcomer(), asks([2, 6, 2])),
        (swarm(asks([2, 6, 2]), *[(n % 3, 1.0, {}) for n in range(MOST + 1)]), newcomer(), asks([2, 6, 2])),
    ],
    ids=["nobody is there", "nobody asks", "it says nothing", "the others say nothing", "too many are there"],
)
def test_nothing_is_said_where_nothing_is_known(book, who, work):
    assert ranked(book, who, work) == book.places()


CLAIMS = st.one_of(st.just(0.0), st.floats(0.0, allow_nan=False, allow_infinity=False))


@given(st.lists(st.tuples(*[CLAIMS] * 5), min_size=4, max_size=4))
def test_no_claim_is_the_end_of_it(claims):
    work = asks([1, 0, 1])
    book = swarm(work, (0, 1.0, {}), (1, 1.0, {}), (2, 1.0, {}))
    here = newcomer()
    people = [*book.volunteers.values(), here]
    for who, (flops, product, computing, uplink, link) in zip(people, claims, strict=True):
        who.flops_per_second, who.product_flops, who.uplink = flops, product, uplink
        who.computing, who.links = computing, {peer: link for peer in book.volunteers if peer != who.peer}
    places = ranked(book, here, work)
    assert [p.model_copy(update={"rank": 0}) for p in places] == list(book.places())
    assert any(p.open and not p.rank for p in places)


def joined(machines, work, layout, *, by_steps, departures=()):
    """The table after `machines`, (FLOP/s, bytes/s) each, have joined one after another."""
    costs = [
        BlockDemand(elements=1, memory=PlaceDemand(activations=1 + block % 2), flops=f)
        for block, f in enumerate(work.flops)
    ]
    book = Membership((layout,), costs, dict(departures))
    for number, (flops, uplink) in enumerate(machines):
        volunteer = VolunteerState(f"v{number:02}", 1, 0.0, flops_per_second=flops, uplink=uplink)
        book.volunteers[volunteer.peer] = volunteer
        place = choose_place(ranked(book, volunteer, work if by_steps else None), AMPLE)
        assert book.claim(volunteer, place.cluster, (place.begin, place.end))
    return book


def test_equal_machines_choose_by_who_holds_what_as_ever():
    work, layout = asks([1, 1, 1, 1, 1, 1]), ((0, 2), (2, 4), (4, 6))
    machines = [(TERA * (0.95 + 0.02 * (n % 5)), 10 * MEGA) for n in range(14)]
    books = [
        joined(machines, work, layout, by_steps=by_steps, departures={"v01": 3, "v04": 1})
        for by_steps in (True, False)
    ]
    places = [{v.peer: (v.cluster, v.place) for v in book.volunteers.values()} for book in books]
    assert places[0] == places[1]


def lines_of(machines):
    count, up = len(machines), np.array([uplink for _, uplink in machines])
    return Devices(
        flops=np.array([flops for flops, _ in machines]),
        memory=np.zeros(count),
        uplink=up,
        latency=LATENCY_S * (1.0 - np.eye(count)),
        bandwidth=np.minimum(up[:, None], up[None, :]),
    )


def some(draw, count, stages):
    """Machines, work and layout: speeds and links as unequal as in people's homes."""
    blocks = 2 * stages
    crossing = [draw.choice((0.2, 1.0, 4.0)) for _ in range(blocks - 1)]
    work = asks([draw.choice((0.5, 1.0, 2.0, 4.0)) for _ in range(blocks)], crossing)
    machines = [(10 ** draw.uniform(12, 13.2), 10 ** draw.uniform(6, 8)) for _ in range(count)]
    return machines, work, tuple((2 * stage, 2 * stage + 2) for stage in range(stages))


@pytest.mark.parametrize(("count", "stages"), [(6, 4), (12, 4), (24, 6)])
def test_steps_are_shorter_than_where_all_choose_by_who_holds_what(count, stages):
    draw, parts = random.Random(1), []
    for _ in range(6):
        machines, work, layout = some(draw, count, stages)
        by_steps, before = (
            as_it_is(lines_of(machines), work, [v.place for v in book.volunteers.values()])
            for book in (joined(machines, work, layout, by_steps=by_steps) for by_steps in (True, False))
        )
        parts.append(by_steps / before)
    assert statistics.geometric_mean(parts) < 0.8


def test_of_several_who_want_the_same_place_one_gets_it_and_the_others_look_again():
    work = asks([2, 6, 6, 2])
    costs = [BlockDemand(elements=1, memory=PlaceDemand(activations=1), flops=f) for f in work.flops]
    court = Court(layouts=(singles(4),), costs=costs, asks=work)
    wanted = {}
    for peer, tflops in (("a", 2), ("b", 6), ("c", 6)):
        court.hello(peer, flops_per_second=TERA * tflops)
        if peer == "a":
            court.tell("a", m.Claim(cluster=0, begin=0, end=1))
    for peer in ("b", "c"):
        place = choose_place(court.sent[peer, "welcome"].places, AMPLE)
        wanted[peer] = place.begin
        court.tell(peer, m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))
    assert wanted == {"b": 1, "c": 1}
    assert court.sent["b", "granted"].begin == 1
    assert choose_place(court.sent["c", "refused"].places, AMPLE).begin == 2


class AsEver(HistoryConfig):
    """A run in which places are not compared."""

    def coordinator(self, numerics):
        return replace(super().coordinator(numerics), asks=None)


def steps_of(kind):
    """Seconds of the last steps of a simulated swarm whose volunteers join one after another and choose for
    themselves.
    """
    tflops = (2, 1, 8, 2, 8, 1)
    work = asks([1, 4, 1, 1], crossing=(0.2, 0.2, 4.0), reduced=MEGA)
    machines = [(TERA * speed, 20 * MEGA) for speed in tflops]
    config = kind(
        volunteers=len(machines),
        layouts=(singles(4),),
        steps=5,
        microbatches=MICROBATCHES,
        evaluation_microbatches=0,
        slot_capacity=MICROBATCHES,
        latency_s=(LATENCY_S, LATENCY_S),
        stall_s=600.0,
        reduce_s=600.0,
        sync_s=600.0,
        speeds=tuple(flops for flops, _ in machines),
        uplinks=tuple(uplink for _, uplink in machines),
        duplicates=0.0,
        hardware=SimHardware(devices=lines_of(machines), work=work, target_s=1.0),
    )
    swarm = CheckedSwarm(1, config, CheckedSymbols(len(work)), Coverage())
    swarm.run(50_000.0)
    return [record["seconds"] for record in swarm.log if record["kind"] == "commit"][-2:]


def test_a_simulated_swarm_is_faster_where_volunteers_choose_by_what_a_step_takes():
    assert statistics.median(steps_of(HistoryConfig)) < 0.7 * statistics.median(steps_of(AsEver))


# ── newcomers that become backups ───────────────────────────────────────────────────────────────────────────


def comes(work, *holders, measured_s=None, policy="step-time", backups=(), **facts):
    """Whether a newcomer at block 0 becomes a backup."""
    book = swarm(work, *holders)
    book.backups = frozenset(backups)
    who = newcomer(**facts)
    book.volunteers[who.peer] = who
    cluster = next(place.cluster for place in book.places() if place.open and place.begin == 0)
    assert book.claim(who, cluster, (0, 1))
    return is_spared(book, who, work, measured_s, policy)


HEAVY = asks([0.001, 0.001], reduced=100 * MEGA)
"""Steps wait for sums."""
BESIDE = [(block, 1.0, {"uplink": MEGA}) for block in (0, 1, 0, 1)]


@pytest.mark.parametrize(
    ("spared", "changes"),
    [
        (True, {}),
        (True, {"policy": "step-time", "measured_s": 10.0}),
        (False, {"measured_s": None}),
        (False, {"measured_s": 1e6}),
        (False, {"policy": "holders"}),
        (False, {"uplink": 1000 * MEGA, "measured_s": 400.0}),
    ],
    ids=["as modelled", "shorter", "nothing measured", "it would not show", "not compared", "it would help"],
)
def test_a_newcomer_that_makes_steps_longer_everywhere_becomes_a_backup(spared, changes):
    assert comes(HEAVY, *BESIDE, **({"measured_s": 100.0, "uplink": MEGA} | changes)) is spared


def test_nobody_is_spared_while_a_block_has_less_than_two_volunteers():
    assert not comes(HEAVY, *BESIDE[:3], measured_s=100.0, uplink=MEGA)
    assert comes(HEAVY, *BESIDE, measured_s=100.0, uplink=MEGA, backups=("v02", "v03"))


def test_nobody_is_spared_where_computing_takes_longest():
    assert not comes(asks([10, 10]), *BESIDE, measured_s=100.0, uplink=MEGA)


def test_coordinates_say_on_which_side_of_a_slow_line_a_newcomer_stands():
    """Half of the pipeline is in each of two towns, and a step waits for the line between them.

    A newcomer that stands beside the first half takes some of that from the second one's first block: the
    holder before it sends to it at once. One beside the second half does the same from the other side.
    """
    here, there = (Coordinate((x, 0.0, 0.0), 2e-3, 0.05) for x in (0.0, 0.2))
    work = asks([1, 1, 1, 1], crossing=(5.0, 5.0, 5.0))
    wide = {"uplink": 100 * MEGA, "downlink": 100 * MEGA}
    slow = {"v02": 10.0, "v03": 10.0}
    for town, block in ((here, 2), (there, 1)):
        book = swarm(
            work,
            (0, 1.0, wide | {"coordinate": here}),
            (1, 1.0, wide | {"coordinate": here, "links": slow}),
            (2, 1.0, wide | {"coordinate": there, "links": {"v01": 10.0, "v00": 10.0}}),
            (3, 1.0, wide | {"coordinate": there}),
        )
        ranks = {p.begin: p.rank for p in ranked(book, newcomer(coordinate=town, **wide), work) if p.open}
        assert [place for place, rank in ranks.items() if rank == 0] == [block]


def test_a_coordinate_is_that_of_the_last_report_and_none_changes_nothing():
    numbers = Coordinate((0.01, 0.0, 0.0), 2e-3, 0.1).numbers()
    volunteer = VolunteerState.of("v", m.Hello(run="r", incarnation=1, coordinate=numbers, downlink=5e6), 0.0)
    assert volunteer.coordinate == Coordinate.of(numbers)
    assert volunteer.downlink == 5e6
    for none in ((), (1, 2), (2**30,) * 5):
        volunteer.moved(none)
        assert volunteer.coordinate == Coordinate.of(numbers)
    volunteer.moved((0, 0, 0, 100, 10))
    assert volunteer.coordinate == Coordinate((0.0, 0.0, 0.0), pytest.approx(1e-3), 0.1)
