"""Volunteers that add up something false, or say so of others, in the simulator: nothing of it is committed,
and nobody else is blamed (docs/trust.md, "Proofs of sums").

That a run ends in the state of one machine is looked at in each history: one false sum in one commit would be
another.
"""

import pytest

from hetpeer.bootstrap.trust.reduce_complaints import CONTRADICTS
from tests.amounts import mostly_proof
from tests.simulation.config import HistoryConfig
from tests.simulation.histories import LAYOUTS, TIES
from tests.simulation.lying_swarms import PAIRS, STEPS, lying, said

SHAPES = {
    "one stage": HistoryConfig(volunteers=5, layouts=LAYOUTS[0]),
    "two stages": HistoryConfig(volunteers=8, layouts=LAYOUTS[1]),
    "uneven, tied": HistoryConfig(volunteers=8, layouts=LAYOUTS[3], ties=TIES),
}
LIES = {
    "one stage": [
        "adds",
        "frames",
        "disowns",
        "adds+perjures",
        "frames+perjures",
        "adds+frames+disowns+perjures",
    ],
    "two stages": ["adds", "frames"],
    "uneven, tied": ["adds+perjures", "frames+perjures"],
}
RARELY = 0.01
"""Share of contributions that are computed once more: so small that only sum proofs matter."""
FEW = 3
"""Steps that are held up."""


def history(shape, lie="", seed=0, faults=0, **more):
    return lying(shape, lie, seed, faults, check_share=RARELY, **more)


@pytest.mark.parametrize(("shape", "lie"), [(shape, lie) for shape, lies in LIES.items() for lie in lies])
def test_a_liar_holds_up_a_few_steps_and_is_in_every_dispute(shape, lie):
    swarm, liar = history(SHAPES[shape], lie)
    assert said(swarm, "quarrel")
    assert all(liar in pair for record in said(swarm, "quarrel") for pair in record["pairs"])
    assert {record["peer"] for record in (*said(swarm, "banned"), *said(swarm, "gone"))} <= {liar}
    assert sum(record["plan"] > 1 for record in said(swarm, "commit")) <= FEW
    assert not said(swarm, "rollback")


@pytest.mark.parametrize("shape", SHAPES)
def test_who_covers_what_it_adds_by_what_it_says_of_a_share_is_turned_out(shape):
    """Its own words suffice. It comes first, so that it counts something from the beginning."""
    swarm, _ = history(SHAPES[shape], lies={"v0": "adds+covers"}, microbatches=16)
    assert CONTRADICTS in {record["why"] for record in said(swarm, "gone")}
    assert all("v0" in pair for record in said(swarm, "quarrel") for pair in record["pairs"])
    assert {record["peer"] for record in (*said(swarm, "banned"), *said(swarm, "gone"))} == {"v0"}


@pytest.mark.parametrize("lie", ["frames", "disowns", "frames+perjures"])
@pytest.mark.parametrize("shape", mostly_proof(PAIRS, [*PAIRS][:1]))
def test_where_it_is_word_against_word_the_run_goes_on_with_one_of_the_two(lie, shape):
    swarm, _ = history(PAIRS[shape], lie)
    assert not said(swarm, "banned")
    assert [record["step"] for record in said(swarm, "commit")] == list(range(STEPS))


@pytest.mark.parametrize(
    "lie", mostly_proof(["frames", "disowns", "frames+perjures"], ["disowns", "frames+perjures"])
)
@pytest.mark.parametrize("seed", mostly_proof(range(3), [1]))
def test_with_steps_that_overlap_and_faults_besides(lie, seed):
    swarm, liar = history(SHAPES["two stages"], lie, seed, faults=4, staleness=seed % 2)
    assert {record["peer"] for record in said(swarm, "banned")} <= {liar}


@pytest.mark.parametrize("seed", mostly_proof(range(3), [1]))
def test_honest_volunteers_come_and_go_and_nobody_is_in_dispute_over_what_was_sent(seed):
    swarm, _ = history(list(SHAPES.values())[seed], seed=seed, faults=8, staleness=seed % 2)
    assert not [record for record in said(swarm, "quarrel") if "is not what was sent" in record["why"]]
    assert not said(swarm, "banned")
