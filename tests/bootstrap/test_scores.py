"""Scores of checkpoints by the author's own function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.results.export import current_model
from hetpeer.bootstrap.results.scores import Scores
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import LocalError

FUNCTION = """\
def scores(model, batch):
    right = model(batch["tokens"]).argmax(-1) == batch["targets"]
    return {"right": right.float().mean(-1), "samples": len(right)}
"""


def written(folder: Path, text: str = FUNCTION) -> str:
    (folder / "scoring.py").write_text(text)
    return f"{folder / 'scoring.py'}:scores"


def returning(folder: Path, value: str) -> str:
    return written(folder, f"import torch\ndef scores(model, batch):\n    return {value}\n")


def test_the_newest_checkpoint_is_scored_on_all_held_out_samples_once(
    trained: RunDirectory, tmp_path: Path
) -> None:
    point = Scores(trained, written(tmp_path)).look()
    assert point is not None
    plan, batches = trained.manifest.data_plan, trained.batches()
    found = [batches.microbatch(0, number) for number in plan.evaluation]
    tokens, targets = (
        torch.cat([torch.from_numpy(one[name]) for one in found]) for name in ("tokens", "targets")
    )
    with torch.no_grad():
        right = (current_model(trained)(tokens).argmax(-1) == targets).double().mean()
    assert point["scores"]["right"] == pytest.approx(float(right))
    assert (point["step"], point["samples"]) == (4, len(tokens))
    assert [json.loads(line) for line in (trained.path / "scores.jsonl").read_text().splitlines()] == [point]


def test_a_score_is_computed_once_and_again_if_the_function_changes(
    trained: RunDirectory, tmp_path: Path
) -> None:
    first = Scores(trained, written(tmp_path))
    assert first.look()
    with (trained.path / "scores.jsonl").open("a") as file:
        file.write('{"kind": "score", "st')
    again = Scores(trained, written(tmp_path))
    assert again.points == first.points
    assert again.look() is None
    (trained.path / "scores.jsonl").write_text("")
    assert Scores(trained, written(tmp_path)).look()
    other = Scores(trained, written(tmp_path, FUNCTION.replace("right.float()", "1 - right.float()")))
    assert not other.points
    found = other.look()
    assert found is not None
    assert found["scores"]["right"] == pytest.approx(1 - first.points[0]["scores"]["right"])


def test_without_a_checkpoint_nothing_is_scored(fresh: RunDirectory, tmp_path: Path) -> None:
    fresh.log_path.unlink(missing_ok=True)
    assert not fresh.log_path.exists() or list(read_log(fresh.log_path)) == []
    assert Scores(fresh, written(tmp_path)).look() is None


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("1.0", "returned a float"),
        ("{}", "returned a dict"),
        ("{'a': torch.zeros(3)}", "'a' is neither"),
        ("{'a': float('nan')}", "'a' is neither"),
        ("{'a': 'good'}", "'a' is neither"),
        ("1 / 0", "ZeroDivisionError: division by zero (scoring.py, line 3)"),
    ],
)
def test_a_function_that_cannot_be_used_is_one_line(
    trained: RunDirectory, tmp_path: Path, value: str, why: str
) -> None:
    with pytest.raises(LocalError) as caught:
        Scores(trained, returning(tmp_path, value)).look()
    assert caught.value.code == "HP-MODEL-017"
    assert why in caught.value.why
    assert not (trained.path / "scores.jsonl").exists()


@pytest.mark.parametrize("reference", ["{}/none.py:scores", "{}/scoring.py:none", "scoring"])
def test_a_function_that_is_not_there_is_named(trained: RunDirectory, tmp_path: Path, reference: str) -> None:
    written(tmp_path)
    with pytest.raises(LocalError, match="HP-MODEL-017"):
        Scores(trained, reference.format(tmp_path))


def test_stopped_it_ends_after_a_batch(trained: RunDirectory, tmp_path: Path) -> None:
    scores = Scores(trained, written(tmp_path))
    calls: list[Any] = []
    inner = scores._function

    def counted(model: Any, batch: Any) -> Any:
        calls.append(batch)
        scores.stop()
        return inner(model, batch)

    scores._function = counted
    assert scores.look() is None
    assert len(calls) == 1
    assert not (trained.path / "scores.jsonl").exists()
