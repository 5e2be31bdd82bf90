"""Weights of samples in a run: taken from the model's loss, and the same curve for any microbatch size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.dht.base.errors import LocalError
from tests.bootstrap.weighted_data import SOURCE, make_run, write_source
from tests.reference.reference_run import run_reference

STEPS, BATCH = 12, 12
TRAINING = TrainingSettings(
    steps=STEPS,
    batch_size=BATCH,
    microbatch_size=4,
    slot_size=1,
    eval_every=6,
    eval_microbatches=2,
    learning_rate=1e-2,
)


def refuses(code: str, act: Callable[[], object], *words: str) -> None:
    """`act` fails with this code, and its text has these words."""
    with pytest.raises(LocalError) as caught:
        act()
    assert caught.value.code == code
    assert all(word in f"{caught.value} {caught.value.why} {caught.value.fix}" for word in words)


def samples_of(run: RunDirectory) -> dict[str, np.ndarray[Any, Any]]:
    """All samples of a run in the order of its shards."""
    reader, data = run.batches(), run.manifest.data
    parts = [reader.open(shard) for shard in (*data.train, *data.heldout)]
    return {name: np.concatenate([part[name] for part in parts]) for name in data.sample}


def test_a_sample_weighs_as_many_targets_as_it_has(tmp_path: Path) -> None:
    run = make_run(tmp_path, TRAINING)
    counted = (samples_of(run)["labels"][:, 1:] != -100).sum(axis=1)
    plan = run.weighted_plan()
    assert plan.weights is not None
    assert plan.weights.tolist() == counted.tolist()
    assert 0 in counted
    for step in range(STEPS):
        for number, weight in enumerate(plan.training_weights(step)):
            labels = run.batches().microbatch(step, number)["labels"]
            assert weight == (labels[:, 1:] != -100).sum()


def test_samples_of_equal_weight_need_no_file(tmp_path: Path) -> None:
    plain = SOURCE.replace("labels[: draw.integers(0, 12)] = -100", "").replace("labels[:] = -100", "pass")
    run = make_run(tmp_path, TRAINING, plain)
    assert run.manifest.data.weights is None
    assert run.weighted_plan().training_weights(0) == (4, 4, 4)


def test_the_curve_is_that_of_the_whole_batch_for_any_microbatch_size(tmp_path: Path) -> None:
    curves = []
    for size in (BATCH, 1, 8):
        folder = tmp_path / str(size)
        folder.mkdir()
        make_run(folder, TRAINING.model_copy(update={"microbatch_size": size}).evaluating(7))
        found = run_reference(folder / "run", STEPS).records
        curves.append([*found["losses"], *found["norms"], *found["evaluations"].values()])
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-6)


WEIGHT = (
    SOURCE.replace(
        "return nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())",
        "each = nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction='none')\n"
        "        return (each.unflatten(0, shifted.shape) * weight).sum() / weight.sum()",
    )
    .replace("input_ids, labels)", "input_ids, labels, weight)")
    .replace('"labels": labels}', '"labels": labels, "weight": (labels != -100).astype(np.float32) / 2}')
)


def test_an_array_named_weight_says_what_samples_weigh(tmp_path: Path) -> None:
    run = make_run(tmp_path, TRAINING, WEIGHT)
    weights = run.weighted_plan().weights
    assert weights is not None
    assert weights.tolist() == samples_of(run)["weight"].sum(axis=1).tolist()


LOSS = """
def loss(outputs, batch):
    counted = (batch["labels"] != -100).float()
    each = nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return each.sum() / counted.sum(), WEIGHT
"""
LOGITS = SOURCE.replace("input_ids, labels)", "input_ids)").replace(
    SOURCE[SOURCE.index("        shifted =") : SOURCE.index("def data")], "        return logits\n\n\n"
)


def run_by_loss(folder: Path, weight: str) -> RunDirectory:
    """A run whose loss function returns `weight`, too."""
    source = write_source(folder, LOGITS + LOSS.replace("WEIGHT", weight))
    names = {"model": f"{source}:Rows", "loss": f"{source}:loss", "data": [f"{source}:data"]}
    return create_run(folder / "run", **names, training=TRAINING)


def test_a_loss_function_says_what_samples_weigh(tmp_path: Path) -> None:
    run = run_by_loss(tmp_path, "2 * counted.sum()")
    weights = run.weighted_plan().weights
    assert weights is not None
    assert weights.tolist() == (2 * (samples_of(run)["labels"] != -100).sum(axis=1)).tolist()


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        ("outputs.sum()", "it depends on the outputs"),
        ("-counted.sum() - 1", "it is -"),
        ("counted", "can be converted to Python scalars"),
    ],
)
def test_a_weight_that_cannot_be_used_is_refused(tmp_path: Path, weight: str, why: str) -> None:
    refuses("HP-MODEL-015", lambda: run_by_loss(tmp_path, weight), why)


def test_a_negative_weight_is_refused(tmp_path: Path) -> None:
    refuses("HP-DATA-005", lambda: make_run(tmp_path, TRAINING, WEIGHT.replace("/ 2", "/ -2")))
    assert not (tmp_path / "run").exists()


def test_a_step_in_which_nothing_counts_is_refused(tmp_path: Path) -> None:
    training = TRAINING.model_copy(update={"batch_size": 1, "microbatch_size": 1})
    refuses("HP-DATA-012", lambda: make_run(tmp_path, training), "--batch-size")
    assert not (tmp_path / "run").exists()


NEGATIVES = SOURCE.replace(
    "return nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())",
    "rows = logits.mean(1)\n"
    "        return nn.functional.cross_entropy(rows @ rows.T, labels.new_ones(len(rows)).cumsum(0) - 1)",
).replace("labels[:] = -100", "pass")


@pytest.mark.parametrize(("text", "says"), [(NEGATIVES, True), (SOURCE, False), (WEIGHT, False)])
def test_samples_that_act_on_each_other_are_said(tmp_path: Path, text: str, says: bool) -> None:
    source, told = write_source(tmp_path, text), list[str]()
    create_run(
        tmp_path / "run",
        model=f"{source}:Rows",
        data=[f"{source}:data"],
        training=TRAINING,
        tell=told.append,
    )
    assert any("samples of a batch act on each other" in line for line in told) is says


NORMED = SOURCE.replace(
    "self.head = nn.Linear(16, 40)", "self.head, self.norm = nn.Linear(16, 40), nn.BatchNorm1d(12)"
)
NORMED = NORMED.replace("self.table(input_ids)", "self.norm(self.table(input_ids))")


@pytest.mark.parametrize(("batch", "says"), [(10, True), (12, False)])
def test_a_small_last_microbatch_is_said_where_there_is_batchnorm(
    tmp_path: Path, batch: int, says: bool
) -> None:
    source, told = write_source(tmp_path, NORMED), list[str]()
    create_run(
        tmp_path / "run",
        model=f"{source}:Rows",
        data=[f"{source}:data"],
        training=TRAINING.model_copy(update={"batch_size": batch}),
        tell=told.append,
    )
    assert any("the last microbatch of a step has 2 samples instead of 4" in line for line in told) is says
    assert not any("samples of a batch act on each other" in line for line in told)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, TRAINING)
    file = run.manifest.data.weights
    assert file is not None
    path = run.data / file.name
    path.write_bytes(bytes(len(path.read_bytes())))
    refuses("HP-RUN-005", run.weighted_plan, file.name)
    refuses("HP-RUN-005", run.verify, file.name)
