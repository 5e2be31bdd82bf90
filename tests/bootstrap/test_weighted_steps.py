"""Weights of microbatches at the coordinator, driven by hand (docs/data.md, "Weights")."""

import pytest

from tests.bootstrap.court import Court

HALVES = (((0, 1), (1, 2)),)


def weighted(*weights, **changes):
    """A court of one microbatch for each weight."""
    return Court(sizes=(1,) * len(weights), weights=lambda _batch: weights, **changes)


def test_holders_of_the_last_block_are_told_the_weights():
    court = weighted(3.0, 1.0, layouts=HALVES).begin("a", "b")
    last, first = sorted("ab", key=lambda peer: court.core.members.volunteers[peer].place, reverse=True)
    assert court.sent[last, "begin"].weights == (3.0, 1.0)
    assert court.sent[first, "begin"].weights == ()


def test_a_run_without_weights_tells_none():
    court = Court().begin("a")
    assert court.sent["a", "begin"].weights == ()


def test_the_loss_is_the_mean_by_weights():
    court = weighted(3.0, 1.0).begin("a")
    court.commit("a")
    (commit,) = (one for one in court.records if one["kind"] == "commit")
    assert commit["loss"] == 0.25  # of the losses 0 and 1
    assert "skipped" not in commit


def test_an_id_without_weight_is_handed_out_to_nobody_and_counts():
    court = weighted(3.0, 0.0, 1.0).begin("a")
    assert {task.id for task in court.sent["a", "begin"].tasks} == {0, 2}
    court.sealed("a", (0, 2))
    court.vote("a")
    (commit,) = (one for one in court.records if one["kind"] == "commit")
    assert commit["skipped"] == [1]
    assert commit["loss"] == 0.5  # of the losses 0 and 2


def test_weights_are_those_of_the_batch():
    court = Court(weights=lambda batch: (1.0, float(batch))).begin("a")
    assert {task.id for task in court.sent["a", "begin"].tasks} == {0}
    court.sealed("a", (0,))
    court.vote("a")
    assert court.sent["a", "begin"].weights == (1.0, 1.0)
    assert {task.id for task in court.sent["a", "begin"].tasks} == {0, 1}


def test_a_step_without_any_weight_halts_the_run():
    court = weighted(0.0, 0.0).begin("a")
    court.tick(1.0)
    assert court.records[-1]["kind"] == "halt"
    assert "all have the weight 0" in court.records[-1]["why"]


def test_held_out_ids_without_weight_are_left_out():
    court = Court(steps=1, evaluation_microbatches=2, evaluation_weights=[0.0, 2.0]).begin("a")
    assert {task.id for task in court.sent["a", "begin"].tasks} == {0, 1, 3}


@pytest.mark.parametrize("ids", [(0, 1), (1,)])
def test_a_slot_with_an_id_without_weight_is_refused(ids):
    court = weighted(3.0, 0.0, 1.0).begin("a")
    court.sealed("a", ids)
    assert court.sent["a", "settled"].refused == (0, 1)
