"""Volunteers that give others false bundles, or say false things of theirs, in the simulator: nothing that
came of it is committed, and no honest one is banned.

That a run ends in the state of one machine is looked at in each history. Each liar is the last to come:
before there are others, nobody can check it.
"""

import dataclasses

import pytest

from hetpeer.bootstrap.conduct.reputation import LAPSES
from tests.amounts import mostly_proof
from tests.simulation.histories import LAYOUTS
from tests.simulation.lying_swarms import history, said
from tests.simulation.test_spotchecks import TWO_STAGES

THREE_STAGES = dataclasses.replace(TWO_STAGES, layouts=(((0, 1), (1, 3), (3, 4)),))
LIARS = {
    "first of two": (TWO_STAGES, 9),
    "last of two": (TWO_STAGES, 8),
    "first of three": (THREE_STAGES, 10),
    "middle of three": (THREE_STAGES, 11),
}
"""Where the liar is → the run, and how many take part."""


def lying(where, lie, **more):
    """The run, and who lies in it."""
    config, volunteers = LIARS[where]
    liar = f"v{volunteers - 1}"
    return dataclasses.replace(config, volunteers=volunteers, lies={liar: lie}, **more), liar


def banned(swarm):
    return {record["peer"] for record in said(swarm, "banned")}


def parted(swarm):
    return swarm.coordinator._context.reputation.apart


@pytest.mark.parametrize(
    ("where", "lie"),
    mostly_proof(
        [
            ("first of two", "outputs"),
            ("first of three", "outputs"),
            ("middle of three", "outputs"),
            ("last of two", "gradients"),
            ("middle of three", "gradients"),
        ],
        [("first of two", "outputs"), ("last of two", "gradients")],
    ),
)
def test_who_gives_several_others_false_bundles_is_banned(where, lie):
    config, liar = lying(where, lie, microbatches=18, slot_capacity=4, steps=4)
    swarm = history(config, 0)
    assert banned(swarm) == {liar}
    assert said(swarm, "rollback"), "what others have computed from them is done again"
    assert not parted(swarm)


@pytest.mark.parametrize("seed", mostly_proof(range(2), [0]))
@pytest.mark.parametrize(
    ("where", "lie"),
    mostly_proof(
        [
            ("first of two", "outputs"),
            ("first of three", "outputs"),
            ("last of two", "gradients"),
            ("middle of three", "gradients"),
        ],
        [("first of three", "outputs"), ("last of two", "gradients")],
    ),
)
def test_who_gives_one_other_a_false_bundle_at_a_time_ends_alone(where, lie, seed):
    """Six microbatches a step: what it counts goes to one or two others, and it is word against word.

    They are kept apart; once that is most of its neighbours, it is banned.
    """
    config, liar = lying(where, lie)
    swarm = history(config, seed)
    assert banned(swarm) == ({liar} if where != "last of two" else set())
    assert all(liar in record["peers"] for record in said(swarm, "dispute"))
    assert bool(parted(swarm)) is (where == "last of two"), "who is banned is forgotten"


@pytest.mark.parametrize(
    ("where", "lie"),
    mostly_proof(
        [
            ("first of two", "lends"),
            ("last of two", "answers"),
            ("first of two", "slanders"),
            ("middle of three", "slanders"),
            ("last of two", "accuses"),
            ("middle of three", "accuses"),
            ("last of two", "check+excuses"),
            ("last of two", "sends+excuses"),
        ],
        [("first of two", "slanders"), ("last of two", "sends+excuses")],
    ),
)
def test_false_words_cost_no_honest_volunteer_its_place(where, lie):
    config, liar = lying(where, lie, microbatches=12, slot_capacity=4, steps=6)
    swarm = history(config, 1)
    assert banned(swarm) == ({liar} if lie not in ("check+excuses", "answers") else set())
    assert all(liar in pair for pair in parted(swarm))
    for record in said(swarm, "dispute"):
        alone = len(record["checkers"]) == 1  # nobody can say whether the checker, or one of these two
        assert liar in record["peers"] or (alone and liar in record["checkers"])


def test_who_accuses_by_false_bundles_is_banned():
    config, liar = lying("middle of three", "accuses", microbatches=18, slot_capacity=4, steps=4)
    assert banned(history(config, 0)) == {liar}


def test_who_says_nothing_of_bundles_is_not_waited_for_any_more():
    config, liar = lying("first of three", "mute", steps=12)
    swarm = history(config, 0)
    assert not banned(swarm)
    assert swarm.coordinator._context.reputation.is_mute(liar)
    seconds = [record["seconds"] for record in said(swarm, "commit")]
    assert sum(took > config.reduce_s + min(seconds) for took in seconds) <= LAPSES


@pytest.mark.parametrize(
    ("liar", "silent", "microbatches"),
    mostly_proof([("v7", "v2", 16), ("v7", "v4", 32), ("v6", "v3", 32)], [("v7", "v2", 16)]),
)
def test_who_says_nothing_of_bundles_hides_no_false_sums_beside_it_and_mutes_nobody_else(
    liar, silent, microbatches
):
    """Enough microbatches that some of each volunteer pass it."""
    lies = {liar: "sends", silent: "mute"}
    swarm = history(dataclasses.replace(TWO_STAGES, lies=lies, microbatches=microbatches, slot_capacity=8), 0)
    assert banned(swarm) == {liar}
    standings = swarm.coordinator._context.reputation
    assert [peer for peer in swarm.volunteers if standings.is_mute(peer)] == [silent]


def test_who_does_not_say_what_it_has_computed_from_has_no_excuse():
    """Three times it is turned out, and its sums with it; then nobody waits for an answer."""
    config, liar = lying("last of two", "gradients+evades", microbatches=18, slot_capacity=4, steps=6)
    swarm = history(config, 0)
    evaded = [record for record in said(swarm, "gone") if "computed from" in record["why"]]
    assert {record["peer"] for record in evaded} == {liar}
    assert len(evaded) <= LAPSES
    assert banned(swarm) == {liar}


@pytest.mark.parametrize("seed", mostly_proof(range(6), range(2)))
def test_honest_volunteers_come_and_go_and_nobody_is_suspected(seed):
    """With steps that overlap, links with room for two bundles, other cuts."""
    config = dataclasses.replace(
        THREE_STAGES, staleness=seed % 2, granted_frames=2 * (seed % 3 == 0), layouts=LAYOUTS[1 + seed % 4]
    )
    swarm = history(config, 20 + seed, faults=10)
    assert not said(swarm, "banned")
    assert not said(swarm, "dispute")
