"""The training curve has the surviving history, each step once, whatever the log went through."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from hetpeer.bootstrap.log.credit import Credit
from hetpeer.bootstrap.log.history import History, Record
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import ParameterGroup
from hetpeer.bootstrap.storage.training_curve import (
    CurvePoints,
    ExactCurve,
    GroupedCurve,
    curve_points,
    learning_rate,
    tokens_in_sample,
)
from tests.amounts import examples
from tests.bootstrap.curve_logs import LOGS, commit, evaluation, rollback


def folded(curve: ExactCurve | GroupedCurve, records: Sequence[Record]) -> list[int]:
    """Numbers of the records in the curve, as a file has them that is appended to unless the curve says that
    it was changed before its end.
    """
    file: list[int] = []
    for number, record in enumerate(records):
        if curve.add(number, record):
            file = list(curve.numbers)
        else:
            assert list(curve.numbers[: len(file)]) == file, record
            file += curve.numbers[len(file) :]
    return file


@examples(300)
@given(LOGS)
def test_it_is_the_history_that_survives(records: list[dict[str, Any]]) -> None:
    found = [records[number] for number in folded(ExactCurve(records), records)]
    history = History.of(records)
    steps = {record["step"]: record for record in found if record["kind"] == "commit"}
    evaluations = {record["step"]: record["loss"] for record in found if record["kind"] == "evaluation"}
    assert steps == history.commits
    assert evaluations == history.evaluations
    assert len(found) == len(steps) + len(evaluations), "none is there twice"


def test_an_evaluation_survives_a_roll_back_to_its_version() -> None:
    records = [commit(0), commit(1), evaluation(1, 2.0), commit(2), rollback(1)]
    assert folded(ExactCurve(records), records) == [0, 2]
    records += [commit(1, 1), evaluation(1, 2.5)]
    assert folded(ExactCurve(records), records) == [0, 5, 6], "evaluated again: the later loss counts"


def test_of_a_grouped_run_what_a_cluster_took_with_it_is_gone() -> None:
    def of(cluster: int, step: int, batch: int) -> dict[str, Any]:
        return {**commit(step), "cluster": cluster, "batch": batch}

    founded = [{"kind": "founded", "cluster": cluster, "version": 0} for cluster in (0, 1)]
    records: list[dict[str, Any]] = [*founded, of(0, 0, 0), of(1, 0, 1), {**evaluation(0), "batch": 0}]
    records += [{"kind": "dissolved", "cluster": 1}, of(0, 1, 1), {**evaluation(0), "batch": 0}]
    curve, credit = GroupedCurve(4), Credit(grouped=4)
    assert folded(curve, records) == [2, 6, 7]
    for record in records:
        credit.add(record)
    commits = [number for number, record in enumerate(records) if record["kind"] == "commit"]
    assert {commits[number - 1] for number in credit.counting} == {2, 6}


def test_a_point_says_what_people_watch(fresh: RunDirectory) -> None:
    training, data = fresh.manifest.training, fresh.manifest.data
    points = CurvePoints(fresh.manifest)
    record = {**commit(3), "squares": [4.0, 2.25], "seconds": 0.5, "gradients": {0: "…"}, "held": [1]}
    point = points.of(record)
    assert point == {
        "kind": "step",
        **{
            name: record[name]
            for name in ("step", "batch", "loss", "norm", "seconds", "term", "view", "plan")
        },
        "learning_rate": training.learning_rate,
        "tokens_per_second": training.batch_size * data.tokens_per_sample / 0.5,
        "block_norms": [2.0, 1.5],
    }
    some = points.of({**record, "skipped": [1]})["tokens_per_second"]
    assert some == (training.batch_size - training.microbatch_size) * data.tokens_per_sample / 0.5
    assert points.of(evaluation(4, 2.0)) == {
        "kind": "evaluation",
        "step": 4,
        "batch": 4,
        "loss": 2.0,
        "perplexity": math.exp(2.0),
    }
    assert "perplexity" not in points.of(evaluation(4, 1e4)), "no float has it"
    assert points.of({**evaluation(4, 2.0), "hits": [3, 4]})["accuracy"] == 0.75


def test_norms_of_groups_are_named_by_their_patterns(fresh: RunDirectory) -> None:
    groups = (ParameterGroup(pattern="*.bias", weight_decay=0.0),)
    training = fresh.manifest.training.model_copy(update={"groups": groups})
    points = CurvePoints(fresh.manifest.model_copy(update={"training": training}))
    record = {**commit(3), "group_squares": [4.0, 2.25]}
    assert points.of(record)["group_norms"] == {"*.bias": 2.0, "others": 1.5}
    assert "group_norms" not in points.of(commit(3)), "a holder of an earlier version has voted"
    assert "group_norms" not in points.of({**record, "group_squares": [4.0]}), "somebody's own idea"
    assert "group_norms" not in CurvePoints(fresh.manifest).of({**record, "group_squares": [4.0]})


def test_the_learning_rate_is_that_of_the_update(fresh: RunDirectory) -> None:
    rising = fresh.manifest.training.model_copy(update={"schedule": ((1, 0.25), (4, 1.0))})
    rates = [learning_rate(rising, batch) / rising.learning_rate for batch in range(5)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize(
    ("shapes", "tokens"),
    [
        ({"input_ids": (8,), "labels": (8,)}, 8),
        ({"tokens": (8,), "targets": (8,)}, 8),
        ({"input_ids": (8,), "labels": ()}, None),
        ({"pixels": (3, 8, 8), "labels": ()}, None),
    ],
)
def test_only_where_each_token_has_a_target_there_is_a_perplexity(
    fresh: RunDirectory, shapes: dict[str, tuple[int, ...]], tokens: int | None
) -> None:
    array = next(iter(fresh.manifest.data.sample.values()))
    sample = {name: array.model_copy(update={"shape": shape}) for name, shape in shapes.items()}
    data = fresh.manifest.data.model_copy(update={"kind": "arrays", "sample": sample})
    assert tokens_in_sample(data) == tokens
    points = CurvePoints(fresh.manifest.model_copy(update={"data": data}))
    assert ("perplexity" in points.of(evaluation(0))) is (tokens is not None)
    speed = points.of({**commit(0), "seconds": 2.0})
    samples = fresh.manifest.training.batch_size / 2.0
    assert speed.get("tokens_per_second") == (tokens and samples * tokens)
    assert speed.get("samples_per_second") == (samples if tokens is None else None)


def test_an_export_has_an_evaluation_before_the_step_that_begins_there(fresh: RunDirectory) -> None:
    records = [commit(0), evaluation(0), commit(1), evaluation(2)]
    order = [(point["kind"], point["step"]) for point in curve_points(fresh.manifest, records)]
    assert order == [("evaluation", 0), ("step", 0), ("step", 1), ("evaluation", 2)]
