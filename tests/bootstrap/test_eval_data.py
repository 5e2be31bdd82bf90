"""Evaluation data of the author's own: all of it is held out, each sample once, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.authoring.run_data import DataOptions
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.samples import source
from hetpeer.dht.base.errors import ExitCode
from tests.bootstrap.engine import TRAINING, make_author
from tests.bootstrap.test_create import assert_fails
from tests.bootstrap.written_data import TEXTS, causal_model, tokenizer_folder, written

MODULE = """
import itertools

import numpy as np
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, ids, label):
        return nn.functional.cross_entropy(self.head(self.embed(ids).mean(1)), label)


def samples(numbers, length=3, classes=4):
    for number in numbers:
        yield {"ids": np.full(length, number % 64), "label": np.int64(number % classes)}


def train():
    return samples(range(20))


def valid():
    return samples(range(40, 47))


def endless():
    return samples(itertools.count(40))


def wider():
    return samples(range(7), length=4)


def beyond():
    return samples(range(7), classes=5)


def none():
    return samples(())
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (path := tmp_path / "small.py").write_text(MODULE)
    return path


def made(tmp_path: Path, module: Path, evaluated: str, **options: Any) -> RunDirectory:
    return create_run(
        tmp_path / "run",
        model=f"{module}:Model",
        data=[f"{module}:train"],
        eval_data=[f"{module}:{evaluated}"],
        reading=DataOptions(**options),
        training=TRAINING,
    )


def evaluated_ids(run: RunDirectory) -> list[int]:
    """First id of each sample of an evaluation, in its order."""
    batches, plan = run.batches(), run.manifest.data_plan
    parts = [batches.microbatch(0, number)["ids"][:, 0] for number in plan.evaluation]
    assert [len(part) for part in parts] == [*plan.evaluation_weights.values()]
    return np.concatenate(parts).tolist()


def test_each_sample_of_it_is_evaluated_once_and_none_is_trained_on(tmp_path: Path, module: Path) -> None:
    run = made(tmp_path, module, "valid")
    run.verify()
    assert sorted(evaluated_ids(run)) == [*range(40, 47)]
    training = run.manifest.training
    assert (training.eval_samples, training.eval_microbatches) == (7, 4)
    assert sum(shard.samples for shard in run.manifest.data.train) == 20
    trained = np.concatenate([load_file(run.data / shard.name)["ids"] for shard in run.manifest.data.train])
    assert sorted(trained[:, 0].tolist()) == [*range(20)]
    assert run.author().eval_data == (f"{module}:valid",)


def test_fewer_are_evaluated_if_asked(tmp_path: Path, module: Path) -> None:
    run = made(tmp_path, module, "endless", eval_samples=5)
    assert sorted(evaluated_ids(run)) == [*range(40, 45)]


def test_an_endless_function_ends_once_there_is_enough(
    tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "READ_AT_LEAST", 1000)
    said: list[str] = []
    run = create_run(
        tmp_path / "run",
        model=f"{module}:Model",
        data=[f"{module}:train"],
        eval_data=[f"{module}:endless"],
        training=TRAINING,
        tell=said.append,
    )
    assert TRAINING.batch_size <= len(evaluated_ids(run)) < 1000
    assert any("--eval-samples N reads more or fewer" in line for line in said)


def test_text_is_held_out_as_it_is(tmp_path: Path) -> None:
    model = make_author(tmp_path / "author")
    (valid := tmp_path / "valid.txt").write_text("What is nine squared? It is 81.\n" * 9)
    text = tmp_path / "author" / "text.txt"
    run = create_run(
        tmp_path / "run", model=model, data=[text], eval_data=[valid], sequence_length=16, training=TRAINING
    )
    for path, shards in ((text, run.manifest.data.train), (valid, run.manifest.data.heldout)):
        tokens = b"".join(load_file(run.data / shard.name)["tokens"].tobytes() for shard in shards)
        assert tokens == path.read_bytes() + b"\n"
    training = run.manifest.training
    assert training.eval_samples == sum(shard.samples for shard in run.manifest.data.heldout) == 18


def test_documents_are_read_as_the_training_data_are(tmp_path: Path) -> None:
    """Another format, the same tokenizer and the same arrays."""
    trained, held_out = TEXTS[:-2], TEXTS[-2:]
    run = create_run(
        tmp_path / "run",
        model=causal_model(tmp_path),
        data=[written(tmp_path / "train.parquet", trained, "text")],
        eval_data=[written(tmp_path / "valid.jsonl", held_out, "text")],
        reading=DataOptions(tokenizer=tokenizer_folder(tmp_path / "tokenizer")),
        sequence_length=128,
        training=TRAINING,
    )
    reader = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for texts, shards in ((trained, run.manifest.data.train), (held_out, run.manifest.data.heldout)):
        ids = np.concatenate([load_file(run.data / shard.name)["input_ids"] for shard in shards])
        found = [reader.decode(row, skip_special_tokens=True).strip() for row in ids]
        assert sorted(found) == sorted(text.strip() for text in texts)


@pytest.mark.parametrize(
    ("evaluated", "code", "said"),
    [
        ("wider", "HP-DATA-005", "'ids' is int64 [3] in --data and int64 [4] in --eval-data"),
        ("beyond", "HP-DATA-010", "label"),
        ("none", "HP-DATA-003", "yields 0 samples"),
        ("missing", "HP-DATA-004", "missing"),
    ],
)
def test_data_that_does_not_fit_is_refused(
    tmp_path: Path, module: Path, evaluated: str, code: str, said: str
) -> None:
    error = assert_fails(
        tmp_path,
        code,
        ExitCode.CONFIG,
        model=f"{module}:Model",
        data=[f"{module}:train"],
        eval_data=[f"{module}:{evaluated}"],
        training=TRAINING,
    )
    assert said in error.line()


def test_text_cannot_be_evaluated_in_a_run_of_arrays(tmp_path: Path, module: Path) -> None:
    (text := tmp_path / "valid.txt").write_text("text " * 100)
    assert_fails(
        tmp_path,
        "HP-DATA-005",
        ExitCode.CONFIG,
        model=f"{module}:Model",
        data=[f"{module}:train"],
        eval_data=[text],
        training=TRAINING,
    )
