"""Volunteers that give false numbers, in the simulator: found out, banned, and nothing of theirs is committed
(docs/trust.md).

That a run ends in the state of one machine is looked at in each history: one false sum in one commit would be
another.
"""

import dataclasses
from functools import cache
from statistics import fmean

import pytest

from hetpeer.bootstrap.conduct.reputation import LAPSES
from tests.amounts import mostly_proof
from tests.simulation.config import HistoryConfig
from tests.simulation.histories import LAYOUTS
from tests.simulation.lying_swarms import history, said

ALL_HOLD_ALL = HistoryConfig(volunteers=4, layouts=LAYOUTS[0], check_share=1.0)
TWO_STAGES = HistoryConfig(volunteers=8, layouts=LAYOUTS[1], check_share=1.0)
SHAPES = pytest.mark.parametrize(
    ("config", "liar"), [(ALL_HOLD_ALL, "v3"), (TWO_STAGES, "v7")], ids=["one stage", "two stages"]
)
"""The liar is the last to come: who is alone at a block is trusted."""


@SHAPES
@pytest.mark.parametrize(("lie", "seed"), [("sends", 0), ("sends", 1), ("pads", 0)])
def test_who_counts_false_sums_is_banned_before_any_of_them_is_committed(config, liar, lie, seed):
    """Be it only in what nobody else receives of it."""
    swarm = history(dataclasses.replace(config, lies={liar: lie}), seed)
    assert {record["peer"] for record in said(swarm, "banned")} == {liar}
    assert not swarm.volunteers[liar].alive, "it was turned away when it came back"


@SHAPES
@pytest.mark.parametrize("seed", mostly_proof(range(2), [0]))
def test_who_accuses_falsely_is_banned_itself(config, liar, seed):
    swarm = history(dataclasses.replace(config, lies={liar: "check"}), seed)
    assert {record["peer"] for record in said(swarm, "banned")} == {liar}


@SHAPES
def test_one_reducer_that_lies_convicts_nobody(config, liar):
    swarm = history(dataclasses.replace(config, lies={liar: "received"}), 0)
    assert not said(swarm, "banned")
    assert all(liar in record["peers"] for record in said(swarm, "dispute"))
    assert said(swarm, "dispute")


@pytest.mark.parametrize("seed", mostly_proof(range(6), range(2)))
def test_honest_volunteers_come_and_go_and_nobody_is_banned(seed):
    """With steps that overlap, links with room for two bundles, other cuts."""
    config = dataclasses.replace(
        TWO_STAGES, staleness=seed % 2, granted_frames=2 * (seed % 3 == 0), layouts=LAYOUTS[1 + seed % 4]
    )
    swarm = history(config, seed, faults=10)
    assert not said(swarm, "banned")
    assert not said(swarm, "dispute")


LONGER = dataclasses.replace(TWO_STAGES, steps=24, evaluate_every=100)


@cache
def honest_seconds(seed):
    """Seconds of each step of LONGER where nobody lies."""
    return [record["seconds"] for record in said(history(LONGER, seed), "commit")]


@pytest.mark.parametrize("lie", ["refuses", "hides"])
@pytest.mark.parametrize("seed", mostly_proof(range(2), [0]))
def test_who_does_not_answer_holds_up_three_checks_and_no_more(lie, seed):
    swarm = history(dataclasses.replace(LONGER, lies={"v7": lie}), seed)
    assert not said(swarm, "banned"), "it has said nothing false"
    assert swarm.coordinator._context.reputation.is_mute("v7")
    # A check that waits in vain expires `reduce_s` after the last answer, and all answers follow the plan: so
    # such a step commits at least `reduce_s` after its plan, by the rule and not by chance. Others take 3 s.
    # (Its whole time is no measure: it also has its computing, which varies by more than the margin.)
    held_up = [
        record["step"] for record in said(swarm, "commit") if record["reduce_seconds"] >= LONGER.reduce_s
    ]
    assert 1 <= len(held_up) <= LAPSES
    after = [record["seconds"] for record in said(swarm, "commit") if record["step"] > held_up[-1]]
    assert fmean(after) < 1.05 * fmean(honest_seconds(seed))


def test_a_third_of_contributions_is_enough_to_find_a_liar_in_the_end():
    config = dataclasses.replace(
        ALL_HOLD_ALL, check_share=0.34, lies={"v3": "check"}, steps=20, evaluate_every=100
    )
    assert {record["peer"] for record in said(history(config, 5), "banned")} == {"v3"}


@SHAPES
def test_who_counts_much_more_than_others_is_checked_though_nobody_was_drawn(config, liar):
    config = dataclasses.replace(config, check_share=1e-9, steps=12, evaluate_every=100)
    assert not said(history(config, 0), "banned")
    swarm = history(dataclasses.replace(config, lies={liar: "exaggerates"}), 0)
    assert {record["peer"] for record in said(swarm, "banned")} == {liar}
