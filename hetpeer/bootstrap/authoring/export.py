"""Results for the author: weights under their own parameter names, the loss curve, generated text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpeer.bootstrap.authoring.adapters import LoraSettings, adapt
from hetpeer.bootstrap.authoring.user_code import build_model
from hetpeer.bootstrap.log.history import History, Record
from hetpeer.bootstrap.log.lineage import lineage
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.run.durable_files import atomic_write, disk_errors
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.checkpoints import CheckpointStore, initial_record
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.block import block_state

if TYPE_CHECKING:
    from torch import Tensor, nn

BYTES = 256
"""Vocabulary size of text: a token is a byte."""
FIELDS = ("step", "cluster", "batch", "loss", "norm", "seconds", "term", "view", "plan")
"""Fields of a commit that go into the curve, if the log has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """Written files: the weights after `version` updates, and the curve of `steps` steps."""

    weights: Path
    metrics: Path
    version: int
    steps: int


def export(directory: Path, out: Path) -> ExportedWeights:
    """Write the newest checkpoint to `out` (safetensors), and the curve to `<stem>.metrics.jsonl` beside it.

    Without a checkpoint the initial state is exported, version 0. Raises `LocalError`: HP-CKPT-001 if the
    checkpoint is damaged, HP-LOG-001, HP-DISK-*.
    """
    from safetensors.torch import save

    run = RunDirectory.open(directory)
    records = list(read_log(run.log_path))
    weights, version = _weights(run, History.of(records))
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"run": json.dumps({"name": run.manifest.name, "id": run.run_id, "version": version})}
    atomic_write(out, save(weights, metadata=metadata))
    metrics, curve = out.with_name(f"{out.stem}.metrics.jsonl"), _curve(run, records)
    atomic_write(metrics, "".join(json.dumps(line) + "\n" for line in curve).encode())
    return ExportedWeights(
        weights=out, metrics=metrics, version=version, steps=sum(p["kind"] == "step" for p in curve)
    )


def generate(directory: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> Iterator[bytes]:
    """Continue `prompt` byte by byte with the newest checkpoint; temperature 0 takes the likeliest byte.

    The author's model is called as `forward(tokens)` and must return logits [1, T, vocabulary]. Raises
    `LocalError` HP-RUN-008 if the run is not of text, HP-MODEL-006 or HP-MODEL-007 when the module does not
    fit it any more, HP-MODEL-010 if it gives no logits.
    """
    import torch

    run = RunDirectory.open(directory)
    if run.manifest.data.kind != "text":
        raise LocalError(
            "HP-RUN-008",
            f"{run.manifest.name} was not trained on text",
            why=f"its samples consist of {', '.join(run.manifest.data.sample)}",
            fix="take the weights with hetpeer export, and use them in your own module",
            exit_code=ExitCode.CONFIG,
        )
    model = _load_model(run)
    generator = torch.Generator().manual_seed(seed)
    context = list(os.fsencode(prompt)) or list(b"\n")
    for _ in range(tokens):
        window = torch.tensor([context[-run.manifest.data.tokens_per_sample :]])
        with torch.no_grad():
            logits = _logits(model, window)
        if temperature > 0:
            chances = torch.softmax(logits / temperature, dim=-1)
            token = int(torch.multinomial(chances, 1, generator=generator))
        else:
            token = int(logits.argmax())
        context.append(token)
        yield bytes([token])


def _logits(model: nn.Module, window: Tensor) -> Tensor:
    """Logits of the byte after `window`. Raises `LocalError` HP-MODEL-010."""
    try:
        logits: Tensor = model(window)[0, -1].float()
    except Exception as error:  # the author's code may raise anything
        raise _no_logits(f"{type(error).__name__}: {error}") from error
    if logits.dim() != 1 or logits.isnan().any():
        raise _no_logits(f"for the last one it gives {list(logits.shape)} numbers, or some that are NaN")
    return logits[:BYTES]  # a model may have more outputs than text has values


def _no_logits(why: str) -> LocalError:
    return LocalError(
        "HP-MODEL-010",
        "the model gives no logits for tokens alone",
        why=why,
        fix="let forward(tokens) return logits [1, T, vocabulary], or use what hetpeer export writes in your "
        "own way",
        exit_code=ExitCode.CONFIG,
    )


def _weights(run: RunDirectory, history: History) -> tuple[dict[str, Tensor], int]:
    """The author's state dict and its number of updates. No two entries share memory, not even tied ones."""
    import torch
    from safetensors.torch import load_file

    from hetpeer.stages.tracing.stored_base import restored

    manifest, layouts = run.manifest, run.layouts()
    store = CheckpointStore(run, layouts)
    record = history.checkpoint or initial_record(manifest)
    version = int(record["version"])
    passes = version * manifest.training.microbatches
    found = {name: torch.tensor(count + passes) for name, count in manifest.counters.items()}
    for path in run.constant_paths():
        found |= restored(load_file(path))
    for block, layout in enumerate(layouts):
        parts = block_state.split(store.load_state(record, block).parameters, layout)
        found |= {name: torch.from_numpy(part) for name, part in parts}
    weights = {
        name: found[source] if name == source else found[source].clone()
        for name, source in manifest.state_dict.items()
    }
    return weights, version


def _load_model(run: RunDirectory) -> nn.Module:
    """The author's model with the current state dict."""
    author = run.author()
    model = build_model(author.model, run.manifest.seed)
    if author.lora is not None:
        adapt(model, LoraSettings.parse(author.lora))
    weights, _ = _weights(run, History.of(read_log(run.log_path)))
    try:
        model.load_state_dict(weights)
        why = ""
    except RuntimeError as error:  # what torch raises for other names and shapes
        why = str(error).splitlines()[-1].strip()
    if why:
        raise LocalError(
            "HP-MODEL-007",
            f"the model {author.model} is not the one of this run any more",
            why=why,
            fix="restore the module as it was at hetpeer init",
            exit_code=ExitCode.VERSION,
        )
    return model.eval()


def _curve(run: RunDirectory, records: Sequence[Record]) -> list[dict[str, Any]]:
    """The surviving curve in order, evaluations before the next step; in log order for a grouped run."""
    averaging = run.manifest.averaging
    if averaging is None:
        history = History.of(records)
        evaluations = [
            (step, 0, _point("evaluation", {"step": step, "loss": loss}))
            for step, loss in history.evaluations.items()
        ]
        steps = [(step, 1, _point("step", commit)) for step, commit in history.commits.items()]
        return [point for _, _, point in sorted(evaluations + steps, key=lambda entry: entry[:2])]
    kept = {id(record) for record in lineage(records).records}
    kinds = {"commit": "step", "evaluation": "evaluation"}
    return [
        _point(kinds[record["kind"]], record)
        for record in records
        if record["kind"] == "evaluation" or (record["kind"] == "commit" and id(record) in kept)
    ]


def _point(kind: str, record: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": kind, **{name: record[name] for name in FIELDS if name in record}}
