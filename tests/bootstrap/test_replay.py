"""What a replay computes, read from logs; and its verdict where the bits cannot be equal."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.audit.replay_result import Replay
from hetpeer.bootstrap.audit.replay_script import ReplayScript, ids_in_turn, reversed_order
from hetpeer.bootstrap.audit.segment_replay import SegmentMachine
from hetpeer.bootstrap.log.evidence import AppliedEvent, Evidence
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import AveragingSettings, LinkSettings
from hetpeer.bootstrap.storage.checkpoints import initial_record, record_of
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.peer_identity import Identity
from tests.bootstrap.engine import Engine, rewrite_log
from tests.swarm.swarm import resign

pytestmark = [pytest.mark.xdist_group("trained run"), pytest.mark.usefixtures("forked_replay")]


def line(**changes: Any) -> AppliedEvent:
    fields: dict[str, Any] = {
        "kind": "applied",
        "run": "r",
        "peer": "p" * 46,
        "incarnation": 1,
        "term": 1,
        "view": 0,
        "step": 0,
        "block": 0,
        "plan": 1,
        "cover": [["a", [3, 1, 2]], ["b", [0]]],
        "gradient": "0" * 64,
        "state": "1" * 64,
    }
    return AppliedEvent.model_validate(fields | changes)


def test_a_line_says_in_which_order_gradients_were_added() -> None:
    assert line(runs=[[2, 1], [1]]).order == (("a", ((3, 1), (2,))), ("b", ((0,),)))


@pytest.mark.parametrize("runs", [[], [[3]], [[2], [1]], [[3], [2]]])
def test_lengths_that_do_not_fit_say_no_order(runs: list[list[int]]) -> None:
    assert line(runs=runs).order is None


def test_lines_that_differ_in_the_order_contradict_each_other() -> None:
    one, other = (line(cover=[["a", ids], ["b", [0]]], runs=[[3], [1]]) for ids in ([3, 1, 2], [1, 3, 2]))
    assert one.counts == other.counts
    assert one.says != other.says


def test_ids_come_in_an_order_that_lets_all_blocks_add_at_once() -> None:
    orders = [(("a", ((3, 1), (2,))), ("b", ((0,),))), (("c", ((2, 3, 1, 0),)),)]
    assert ids_in_turn(orders) == [2, 3, 1, 0]


def test_where_blocks_contradict_each_other_every_id_still_comes_once() -> None:
    orders = [(("a", ((0, 1, 2),)),), (("b", ((2, 1, 0),)),)]
    assert sorted(ids_in_turn(orders)) == [0, 1, 2]


def test_an_order_turned_round_has_the_same_sums() -> None:
    order = (("a", ((3, 1), (2,))), ("b", ((0,),)))
    assert reversed_order(order) == (("b", ((0,),)), ("a", ((2,), (1, 3))))
    assert reversed_order(reversed_order(order)) == order


def script_of(run: RunDirectory) -> ReplayScript:
    evidence = Evidence.read(run.volunteers, run.run_id)
    return ReplayScript.of(list(read_log(run.log_path)), evidence, len(run.manifest.blocks))


def test_segments_begin_at_the_checkpoints_that_are_kept(trained: RunDirectory) -> None:
    script = script_of(trained)
    bases = [record_of(version, []) for version in (0, 2, 4)]
    first, second = script.segments(bases)
    assert [one.step for one in first.steps] == [0, 1]
    assert [one.step for one in second.steps] == [2, 3]
    assert (first.evaluations.keys(), second.evaluations.keys()) == ({0}, {2, 4})
    assert (first.end, second.end) == (bases[1], bases[2])
    assert first.arithmetic == "", "the lines do not say it"


def test_a_checkpoint_that_a_later_step_looks_behind_is_no_base(trained: RunDirectory) -> None:
    def overlaps(records: list[dict[str, Any]]) -> None:
        [commit] = [r for r in records if r["kind"] == "commit" and r["step"] == 3]
        commit["behind"] = 2

    rewrite_log(trained, overlaps)
    (only,) = script_of(trained).segments([record_of(version, []) for version in (0, 2)])
    assert [one.step for one in only.steps] == [0, 1, 2, 3]


# ── verdicts where bits cannot be equal ─────────────────────────────────────────────────────────────────────


def test_a_plain_trainer_is_as_near_as_rounding_allows(trained: RunDirectory) -> None:
    """Its lines name no order and no processor, and torch's own AdamW rounds otherwise than the blocks'."""
    replayed = replay(trained.path)
    assert replayed.ok, replayed.problems
    assert (replayed.near, replayed.equal, replayed.steps) == (4, 0, 4)
    assert "earlier version" in replayed.why
    assert 0 < replayed.farthest <= replayed.bound < 1e-5


def test_what_makes_bounds_is_computed_to_its_end_whatever_arithmetic_the_run_has(
    trained: RunDirectory, tmp_path: Path
) -> None:
    """Kernels without wide vectors may be just what the run has: its bits are not compared then."""
    records, evidence = list(read_log(trained.log_path)), Evidence.read(trained.volunteers, trained.run_id)
    script = ReplayScript.of(records, evidence, len(trained.manifest.blocks))
    (segment, *_) = script.segments([initial_record(trained.manifest)])
    machine = SegmentMachine(trained, 1, tmp_path)
    (known,) = machine.compute([segment])
    steps = [
        replace(
            step,
            arithmetics=frozenset((machine.arithmetic,)),
            blocks=[replace(block, ordered=True) for block in step.blocks],
        )
        for step in segment.steps
    ]
    told = replace(segment, steps=steps)
    assert told.arithmetic == machine.arithmetic
    (native,), (noisy,) = machine.compute([told]), machine.compute([told], otherwise=True, noise=1)
    assert len(native.results) < len(known.results), "its first state is not the run's"
    assert len(noisy.results) == len(known.results)
    assert all(one["sketches"] for one in noisy.results if "step" in one)
    assert noisy.states.exists()


@pytest.mark.parametrize("scale", [1.0001, 1.001])
def test_a_gradient_off_by_a_ten_thousandth_is_found(
    fresh: RunDirectory, volunteers: list[Identity], scale: float
) -> None:
    Engine(fresh, volunteers, gradient_scale=scale).train()
    replayed = replay(fresh.path)
    assert not replayed.ok
    assert replayed.problems[0].startswith("step 0: the norm is not what one machine gets")


def test_a_microbatch_that_was_skipped_and_can_be_computed_is_named(trained: RunDirectory) -> None:
    def skip(records: list[dict[str, Any]]) -> None:
        for record in records:
            if (record["kind"], record.get("step")) == ("commit", 1):
                record["skipped"] = [3]

    rewrite_log(trained, skip)
    assert replay(trained.path).problems == [
        "step 1: the failure of microbatch 3 is not what one machine gets"
    ]


def test_a_loss_off_by_a_hundred_thousandth_is_found(trained: RunDirectory) -> None:
    def change(records: list[dict[str, Any]]) -> None:
        [commit] = [r for r in records if r["kind"] == "commit" and r["step"] == 3]
        commit["loss"] *= 1 + 1e-5

    rewrite_log(trained, change)
    assert replay(trained.path).problems[0].startswith("step 3: the loss is not")


def test_parameters_of_a_checkpoint_off_by_a_thousandth_are_found(
    fresh: RunDirectory, volunteers: list[Identity]
) -> None:
    engine = Engine(fresh, volunteers)
    engine.train()
    for flat in engine.flats:
        flat.detach().mul_(1.001)
    checkpoint = engine.checkpoint(4)
    rewrite_log(fresh, lambda records: records.__setitem__(-1, checkpoint))
    (problem,) = replay(fresh.path).problems
    assert problem.startswith("step 3: the parameters of the checkpoint of block 0")


def test_no_author_is_needed(trained: RunDirectory) -> None:
    (trained.path / "author.json").unlink()
    assert replay(trained.path).ok


def test_a_run_that_has_not_begun_has_nothing_to_compare(fresh: RunDirectory) -> None:
    replayed = replay(fresh.path)
    assert (replayed.ok, replayed.steps, replayed.equal) == (True, 0, 0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"averaging": AveragingSettings(robust=True)}, "clipped"),
        ({"averaging": AveragingSettings(), "links": LinkSettings(reduce="int8")}, "round tensors"),
        ({"averaging": AveragingSettings(), "links": LinkSettings(codec="int8")}, "round tensors"),
    ],
)
def test_a_grouped_run_whose_numbers_one_machine_cannot_get(
    fresh: RunDirectory, changes: dict[str, Any], why: str
) -> None:
    resign(fresh, **changes)
    with pytest.raises(LocalError, match=why) as caught:
        replay(fresh.path)
    assert (caught.value.code, caught.value.exit_code) == ("HP-AUDIT-002", ExitCode.CONFIG)


def test_a_grouped_run_that_has_not_begun_has_nothing_to_compare(fresh: RunDirectory) -> None:
    resign(fresh, averaging=AveragingSettings(window_s="all"))
    replayed = replay(fresh.path)
    assert (replayed.ok, replayed.steps, replayed.equal) == (True, 0, 0)


def test_too_little_memory_is_one_clear_line(
    trained: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The child is limited to less address space than torch takes."""
    import resource

    from hetpeer.bootstrap.audit import child_process, segment_replay

    monkeypatch.setattr(segment_replay, "run_child", child_process.run_child)
    tie = child_process.dying_with_us()

    def limited() -> None:
        tie()
        resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))

    monkeypatch.setattr(child_process, "dying_with_us", lambda: limited)
    with pytest.raises(LocalError) as caught:
        replay(trained.path)
    assert caught.value.code == "HP-AUDIT-001"
    assert "memory" in caught.value.line()


def test_a_sample_says_how_much_it_may_have_missed(trained: RunDirectory) -> None:
    replayed = replay(trained.path, sample=1)
    assert replayed.ok
    assert replayed.sample == 1
    assert 1 <= replayed.near <= 4
    assert (Replay(steps=1000, sample=20).undetected, Replay(steps=1000, sample=1000).undetected) == (137, 0)
    assert Replay(steps=100).undetected == 0
