"""`hetpeer init` on files as people have them: the run it makes, and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.authoring.run_data import DataOptions
from hetpeer.bootstrap.authoring.user_code import build_model
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.samples import source
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data.extremes import IGNORED
from hetpeer.stages.data.microbatches import MicrobatchReader
from hetpeer.stages.data.shards import Arrays
from tests.bootstrap.engine import TRAINING
from tests.bootstrap.test_create import assert_fails
from tests.bootstrap.written_data import (
    CHATS,
    TEXTS,
    causal_model,
    own_model,
    tokenizer_folder,
    written,
)


def made(tmp_path: Path, model: str, data: Path | str, **options: Any) -> RunDirectory:
    reading = DataOptions(tokenizer=tokenizer_folder(tmp_path / "tokenizer"), **options)
    return create_run(
        tmp_path / "run", model=model, data=[data], reading=reading, sequence_length=128, training=TRAINING
    )


def arrays_of(run: RunDirectory) -> Arrays:
    """All samples of a run, training and held out."""
    reader = MicrobatchReader(run.data, run.manifest.data_plan)
    parts = [reader.open(shard) for shard in (*run.manifest.data.train, *run.manifest.data.heldout)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def decoded(tmp_path: Path, ids: np.ndarray) -> str:
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer").decode(ids)


def test_chats_in_parquet_for_a_model_of_transformers(tmp_path: Path) -> None:
    run = made(tmp_path, causal_model(tmp_path), written(tmp_path / "a.parquet", CHATS, "messages"))
    run.verify()
    arrays = arrays_of(run)
    assert sorted(arrays) == ["attention_mask", "input_ids", "labels"]
    said = sorted(decoded(tmp_path, row[row != IGNORED]) for row in arrays["labels"])
    assert said == sorted(f"{text}<|end|>no more<|end|>" for text in TEXTS)
    assert (arrays["attention_mask"] == (arrays["input_ids"] != 0)).all()


def test_packed_texts_for_a_model_of_transformers(tmp_path: Path) -> None:
    run = made(tmp_path, causal_model(tmp_path), written(tmp_path / "a.jsonl", TEXTS), packed=True)
    arrays = arrays_of(run)
    assert sorted(arrays) == ["input_ids", "labels", "position_ids"]
    found = sorted(
        decoded(tmp_path, part)
        for ids, places in zip(arrays["input_ids"], arrays["position_ids"], strict=True)
        for part in np.split(ids, np.flatnonzero(places == 0)[1:])
        if (part != 0).all()
    )
    assert found == sorted(f"{text}<|end|>" for text in TEXTS)

    # Each document's loss is what the model gives it alone, under the attention that it chooses itself.
    model = build_model(run.author().model, run.manifest.seed).eval()
    for row in range(3):
        batch = {name: torch.from_numpy(array[row]).unsqueeze(0) for name, array in arrays.items()}
        alone = [
            (model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1), ids.shape[1] - 1)
            for part in np.split(
                arrays["input_ids"][row], np.flatnonzero(arrays["position_ids"][row] == 0)[1:]
            )
            if (part != 0).all()
            for ids in [torch.from_numpy(part).unsqueeze(0)]
        ]
        assert len(alone) > 1
        whole = sum(loss for loss, _ in alone) / sum(count for _, count in alone)
        assert torch.isclose(model(**batch).loss, whole, rtol=1e-5)


def test_a_module_that_names_tokens_and_targets_gets_those(tmp_path: Path) -> None:
    arrays = arrays_of(made(tmp_path, own_model(tmp_path), written(tmp_path / "a.csv", TEXTS)))
    assert sorted(arrays) == ["targets", "tokens"]
    counted = arrays["targets"][:, :-1] != IGNORED
    assert (arrays["targets"][:, :-1][counted] == arrays["tokens"][:, 1:][counted]).all()


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_without_a_tokenizer_the_text_of_a_record_is_bytes(tmp_path: Path, name: str) -> None:
    run = create_run(
        tmp_path / "run",
        model=own_model(tmp_path),
        data=[written(tmp_path / name, TEXTS)],
        sequence_length=16,
        training=TRAINING,
    )
    assert run.manifest.data.kind == "text"
    assert arrays_of(run)["tokens"].tobytes().decode() == "".join(f"{text}\n" for text in TEXTS)


def test_at_most_as_many_samples_as_asked_for(tmp_path: Path) -> None:
    data = written(tmp_path / "a.jsonl", TEXTS)
    run = made(tmp_path, own_model(tmp_path), data, max_samples=13)
    assert len(arrays_of(run)["tokens"]) == 13
    (tmp_path / "text.txt").write_text("word " * 1000)
    for number, path in enumerate((data, tmp_path / "text.txt")):
        run = create_run(
            tmp_path / f"bytes{number}",
            model=own_model(tmp_path),
            data=[path],
            reading=DataOptions(max_samples=13),
            sequence_length=16,
            training=TRAINING,
        )
        assert len(arrays_of(run)["tokens"]) == 13 * 16 + 1


ENDLESS = """
import itertools, numpy

def data():
    for number in itertools.count():
        yield {"tokens": numpy.full(8, number % 300), "targets": numpy.full(8, number % 300)}
"""


@pytest.mark.parametrize("most", [None, 50])
def test_an_endless_function_ends_with_what_the_steps_need(
    tmp_path: Path, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "READ_AT_LEAST", 1000)
    (tmp_path / "endless.py").write_text(ENDLESS)
    said: list[str] = []
    run = create_run(
        tmp_path / "run",
        model=own_model(tmp_path),
        data=[f"{tmp_path / 'endless.py'}:data"],
        reading=DataOptions(max_samples=most),
        training=TRAINING,
        tell=said.append,
    )
    count = len(arrays_of(run)["tokens"])
    needed = TRAINING.steps * TRAINING.batch_size
    assert (
        count == most
        if most
        else needed <= sum(shard.samples for shard in run.manifest.data.train) < 1.2 * needed
    )
    assert any(f"{count:,} samples are read, more than the steps need" in line for line in said) == (
        most is None
    )


def test_the_model_is_looked_at_before_the_data(tmp_path: Path) -> None:
    """A function that would never end, and a model that cannot be traced."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    (tmp_path / "wrong.py").write_text(
        "from torch import nn\n\nclass Model(nn.Linear):\n    def forward(self, tokens):\n"
        "        return super().forward(tokens.float() if tokens.sum() > 3 else tokens).sum()\n\n"
        "def build():\n    return Model(8, 8)\n"
    )
    data = [f"{tmp_path / 'endless.py'}:data"]
    assert_fails(
        tmp_path,
        "HP-MODEL-002",
        ExitCode.CONFIG,
        model=f"{tmp_path / 'wrong.py'}:build",
        data=data,
        training=TRAINING,
    )


def refused(tmp_path: Path, code: str, model: str, data: Path | str, **options: Any) -> LocalError:
    folder = tokenizer_folder(tmp_path / "tokenizer")
    return assert_fails(
        tmp_path,
        code,
        ExitCode.CONFIG,
        model=model,
        data=[data],
        reading=DataOptions(tokenizer=folder, **options),
        sequence_length=32,
        training=TRAINING,
    )


def test_a_tokenizer_of_another_vocabulary(tmp_path: Path) -> None:
    error = refused(
        tmp_path, "HP-DATA-009", causal_model(tmp_path, 280), written(tmp_path / "a.jsonl", TEXTS)
    )
    assert "has more ids than the model" in error.what
    assert "the model fails on that one: IndexError" in error.why


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "saved"])
def test_an_empty_data_set(tmp_path: Path, name: str) -> None:
    refused(tmp_path, "HP-DATA-003", causal_model(tmp_path), written(tmp_path / name, []))


def test_a_bad_line_far_behind_leaves_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", TEXTS * 40)
    with path.open("a") as file:
        file.write("{\n")
    error = refused(tmp_path, "HP-DATA-008", causal_model(tmp_path), path)
    assert f"line {40 * len(TEXTS) + 1} of" in error.what


def test_packing_needs_a_model_that_keeps_documents_apart(tmp_path: Path) -> None:
    data = written(tmp_path / "a.jsonl", TEXTS)
    error = refused(tmp_path, "HP-DATA-011", own_model(tmp_path), data, packed=True)
    assert "takes no position_ids" in error.why
    (tmp_path / "mixing.py").write_text(
        "import torch\nfrom torch import nn\n\nclass Model(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed, self.head = nn.Embedding(300, 8), nn.Linear(8, 300)\n\n"
        "    def forward(self, tokens, targets, position_ids):\n"
        "        x = self.embed(tokens).cumsum(1) + position_ids.unsqueeze(-1)\n"
        "        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())\n"
    )
    error = refused(tmp_path, "HP-DATA-011", f"{tmp_path / 'mixing.py'}:Model", data, packed=True)
    assert "the loss of a document is" in error.why


LABELS = """
import numpy

def data():
    for number in range(100):
        label = {label} if number == 77 else number
        yield {{"tokens": numpy.full(8, number), "targets": numpy.full(8, label)}}
"""


@pytest.mark.parametrize(("label", "bad"), [("300", True), ("-1", True), ("-100", False), ("299", False)])
def test_labels_out_of_range_are_named(tmp_path: Path, label: str, bad: bool) -> None:
    (tmp_path / "labels.py").write_text(LABELS.format(label=label))
    arguments: Any = {"data": [f"{tmp_path / 'labels.py'}:data"], "training": TRAINING}
    model = own_model(tmp_path)
    if not bad:
        create_run(tmp_path / "run", model=model, **arguments)
        return
    error = assert_fails(tmp_path, "HP-DATA-010", ExitCode.CONFIG, model=model, **arguments)
    assert f"'targets' has the value {label}" in error.what
    assert f"goes from {min(0, int(label))} to {max(99, int(label))}" in error.why


def test_a_label_out_of_range_is_only_mentioned_where_such_samples_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "labels.py").write_text(LABELS.format(label="300"))
    said: list[str] = []
    create_run(
        tmp_path / "run",
        model=own_model(tmp_path),
        data=[f"{tmp_path / 'labels.py'}:data"],
        training=TRAINING.model_copy(update={"on_bad_sample": "skip"}),
        tell=said.append,
    )
    assert "'targets' has the value 300" in said[-1]


@pytest.mark.parametrize(
    ("options", "named"),
    [({"packed": True}, "--packed"), ({"text_field": "a"}, "--text-field"), ({}, "--tokenizer")],
)
def test_options_that_would_do_nothing_are_refused(tmp_path: Path, options: Any, named: str) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    error = refused(tmp_path, "HP-RUN-001", own_model(tmp_path), f"{tmp_path / 'endless.py'}:data", **options)
    assert named in error.what


WITHOUT = """
import sys
from pathlib import Path
sys.modules[{package!r}] = None
from hetpeer.peer.cli.main import run
sys.argv = ["hetpeer", "init", "run", "--model", "own.py:Model", "--data", {data!r}, *{more!r}]
run()
"""


@pytest.mark.parametrize(
    ("package", "data", "more"),
    [
        ("pyarrow", "a.parquet", []),
        ("datasets", "saved", []),
        ("transformers", "a.jsonl", ["--tokenizer", "tokenizer"]),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, package: str, data: str, more: list[str]
) -> None:
    own_model(tmp_path)
    written(tmp_path / data, TEXTS)
    tokenizer_folder(tmp_path / "tokenizer")
    before = sorted(path.name for path in tmp_path.iterdir())
    code = WITHOUT.format(package=package, data=data, more=more)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.CONFIG, done.stderr
    assert (
        f"it needs the package {package}, which only authors need; do: pip install 'hetpeer[hf]'"
        in done.stderr
    )
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == before


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: int, status: int) -> None:
    (tmp_path / "endless.py").write_text(
        ENDLESS.replace("def data():\n", "def data():\n    open('begun', 'w').close()\n")
    )
    model = own_model(tmp_path)
    command = [sys.executable, "-m", "hetpeer.peer.cli.main", "init", "run", "--model", model]
    with subprocess.Popen(
        [*command, "--data", "endless.py:data"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    ) as process:
        try:
            until = time.monotonic() + 120
            while not [*tmp_path.glob(".run.*/data/samples.spool")] and time.monotonic() < until:
                time.sleep(0.05)
            assert [*tmp_path.glob(".run.*/data/samples.spool")], "no sample was written in 120 s"
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == status, said
    assert "Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "endless.py", "own.py"]
