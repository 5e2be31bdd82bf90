"""From what volunteers say of themselves to who has which blocks from now on, and when to look."""

import itertools
from typing import Any

import pytest

from hetpeer.bootstrap.membership import BlockCost, Membership, Volunteer
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.dht.records import Advert, LinkNote
from hetpeer.peer.planning.replanning import Proposal, Seating, proposal
from hetpeer.peer.planning.workload import of_manifest
from hetpeer.peer.reliable.proposing import AGAIN_S, SETTLED_S, Calm
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
) -> Proposal | None:
    left = iter(range(looks))
    return proposal(
        run.manifest, adverts, seats, steps_left=1000, seed=1, on=lambda: next(left, None) is not None
    )


def test_who_is_left_takes_over_what_nobody_comes_for(run: RunDirectory) -> None:
    found = asked(run, {"a": advert(1e9)}, seating(a=(0, (0, 2))))
    assert found is not None
    assert found.arrangement.seats == {"a": (0, (0, BLOCKS))}
    assert found.arrangement.fault(BLOCKS) is None
    assert (found.before_s, found.moved) == (float("inf"), 2)


def test_slow_and_fast_change_their_shares(run: RunDirectory) -> None:
    """A hundred times slower with half of the blocks."""
    adverts = {"fast": advert(1e7), "slow": advert(1e5)}
    found = asked(run, adverts, seating(fast=(0, (0, 2)), slow=(0, (2, 4))))
    assert found is not None
    assert found.after_s < found.before_s
    assert found.arrangement.seats.keys() == adverts.keys()
    _, (begin, end) = found.arrangement.seats["fast"]
    assert end - begin >= 3
    assert found.arrangement.fault(BLOCKS) is None


def test_whom_the_plan_spares_keeps_a_place(run: RunDirectory) -> None:
    """Nobody is sent away: who is too slow for a pipeline stays as a further holder."""
    adverts = {"a": advert(1e7), "b": advert(1e7), "slow": advert(1e2)}
    seats = seating(a=(0, (0, 2)), slow=(0, (2, 4)), b=(1, (0, 2)))
    found = asked(run, adverts, seats)
    assert found is not None
    assert found.arrangement.seats.keys() == adverts.keys()
    assert found.arrangement.fault(BLOCKS) is None
    fast = [found.arrangement.seats[peer] for peer in "ab"]
    covered = {block for _, place in fast for block in range(*place)}
    assert covered == set(range(BLOCKS))


def test_whom_the_plan_spares_gets_no_blocks_that_it_has_no_room_for(run: RunDirectory) -> None:
    uneven = ((0, 1), (1, 4))
    seats = Seating(
        layouts=(uneven, uneven),
        seats={"small": (0, (0, 1)), "a": (0, (1, 4)), "b": (1, (0, 1)), "c": (1, (1, 4))},
    )
    adverts = dict.fromkeys("abc", advert(1e7)) | {"small": advert(1e2, memory_bytes=500_000)}
    found = asked(run, adverts, seats)
    assert found is not None
    assert found.arrangement.fault(BLOCKS) is None
    memory = of_manifest(run.manifest, run.manifest.training.microbatches).memory
    assert memory[slice(*found.arrangement.seats["small"][1])].sum() <= 500_000


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
            layouts=tuple(tuple(layout) for layout in first.arrangement.layouts),
            seats=first.arrangement.seats,
        )
        assert asked(run, adverts, seats) is None


@pytest.mark.parametrize(
    "adverts", [{}, {"a": advert(1e9)}, {"a": advert(1e9), "b": Advert(role="volunteer")}]
)
def test_nothing_is_proposed_before_everybody_has_said_what_it_can_do(
    run: RunDirectory, adverts: dict[str, Advert]
) -> None:
    assert asked(run, adverts, seating(a=(0, (0, 2)), b=(0, (2, 4)))) is None


def test_a_seating_is_the_coordinators() -> None:
    cost = BlockCost(elements=1, memory_bytes=1, flops=1.0)
    members = Membership((HALVES,), [cost] * BLOCKS)
    for number, place in enumerate((None, (2, 4))):
        members.volunteers[f"v{number}"] = Volunteer(f"v{number}", 1, 0.0, cluster=0, place=place)
    assert Seating.of(members) == seating(v1=(0, (2, 4)))


def test_it_is_calm_when_nobody_came_or_went_for_a_while() -> None:
    calm, here, fewer = Calm(), seating(a=(0, (0, 2)), b=(0, (2, 4))), seating(a=(0, (0, 2)))
    looks = itertools.count(100.0, 5.0)
    changes = [(here, 60), (fewer, 60), (here, 40)]
    due: list[tuple[int, float]] = []
    for which, (seats, times) in enumerate(changes):
        began = None
        for now in itertools.islice(looks, times):
            began = now if began is None else began
            if calm(seats, now):
                due.append((which, now - began))
    assert [one for one in due if one[0] == 0] == [
        (0, SETTLED_S),
        (0, SETTLED_S + AGAIN_S),
        (0, SETTLED_S + 2 * AGAIN_S),
    ]
    assert [one for one in due if one[0] == 2] == [(2, SETTLED_S), (2, SETTLED_S + AGAIN_S)]


def test_what_was_moved_is_left_alone_until_it_is_measured_unless_somebody_goes() -> None:
    before, after = seating(a=(0, (0, 2)), b=(0, (2, 4))), seating(a=(0, (2, 4)), b=(0, (0, 2)))
    calm = Calm()
    assert not calm(before, 0.0)
    assert calm(before, SETTLED_S)
    calm.changed(SETTLED_S)
    assert not calm(after, SETTLED_S + 10.0)
    assert not calm(after, 2 * SETTLED_S + 20.0)
    assert calm(after, SETTLED_S + AGAIN_S)
    fewer = seating(a=(0, (2, 4)))
    calm.changed(200.0)
    assert not calm(fewer, 210.0)
    assert calm(fewer, 210.0 + SETTLED_S)
