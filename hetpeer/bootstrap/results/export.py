"""Results for the author: the weights under their original names, and the loss curve."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from hetpeer.bootstrap.authoring.user_code import build_model
from hetpeer.bootstrap.consensus.replica import credit_in
from hetpeer.bootstrap.log.history import History, Record
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.pretrained.adapters import LoraSettings, adapt, merged_weights, save_adapter
from hetpeer.bootstrap.pretrained.card import ModelCard
from hetpeer.bootstrap.pretrained.formats import Dtype, Format
from hetpeer.bootstrap.pretrained.kept import FOLDER, KeptFiles
from hetpeer.bootstrap.pretrained.source import ModelSource, base_of, is_named
from hetpeer.bootstrap.pretrained.tasks import Task
from hetpeer.bootstrap.pretrained.written import (
    is_export,
    not_exported,
    original_names,
    write_about,
    write_model,
)
from hetpeer.bootstrap.run.durable_files import GrowingFile, atomic_write, disk_errors, made_beside
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.checkpoints import CheckpointStore, best_of, initial_record
from hetpeer.bootstrap.storage.training_curve import curve_points
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.block.block_state import in_memory, split
from hetpeer.stages.block.tensor_file import write_tensors
from hetpeer.stages.operators.names import BOTTLENECK

if TYPE_CHECKING:
    from torch import Tensor, nn

SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights:
    """Written files: the model after `version` updates, and the curve of `steps` steps."""

    weights: Path
    """File, or folder."""
    metrics: Path
    version: int
    steps: int
    part: str = ""
    """Name of the part of the author's module whose own names the weights have; empty: the whole module."""
    left_out: tuple[str, ...] = ()
    """Weights of the author's module that are no part of the model of transformers in it."""


def export(
    directory: Path,
    out: Path,
    form: Format | None = None,
    dtype: Dtype = Dtype.FLOAT32,
    *,
    numbered: bool = False,
    best: bool = False,
) -> ExportedWeights:
    """Write the newest checkpoint of a run, which may be going on.

    `form`: None stands for a folder if the run is of a model of transformers without bottlenecks and `out`
    does not end with `.safetensors`. A folder has everything in it; a file gets the curve beside it,
    `<stem>.metrics.jsonl`.
    Adapters are added to the layers that they adapt, except in the form ADAPTER, which has nothing else.
    `numbered`: write below `out`, as `checkpoint-` with the number of updates. `best`: the checkpoint of the
    lowest held-out loss instead. Without a checkpoint the initial state is exported, version 0. Raises
    `LocalError`: HP-CKPT-001 if the checkpoint is damaged, HP-CKPT-002 if none was evaluated, HP-MODEL-014 if
    it cannot have this form, HP-LOG-001, HP-DISK-*.
    """
    run = RunDirectory.open(directory)
    kept = KeptFiles(run.path / FOLDER)
    thin = _has_bottlenecks(run)
    if form is None:
        own = kept.has_model and out.suffix != SUFFIX and not thin
        form = Format.HF if own else Format.SAFETENSORS
    if form is Format.HF and thin:
        raise not_exported(
            "the run has bottlenecks, which are no part of a model of transformers",
            "give --format safetensors, and put them behind the same layers of your module (docs/links.md)",
        )
    if form is Format.HF and not kept.has_model:
        raise not_exported(
            "the run is of a module of your own, or was made by an earlier hetpeer",
            "give --format safetensors",
        )
    adapted = _has_adapters(run)
    if form is Format.ADAPTER and not adapted:
        raise not_exported(
            "the run has no adapters: it was made without --lora",
            "give --format hf or safetensors, on the machine where the run was made",
        )
    records, weights, version = _newest(run, best=best)
    if numbered:
        out /= f"checkpoint-{version}{SUFFIX if form is Format.SAFETENSORS else ''}"
    part = _part(run)
    model = _with_weights(run, weights) if adapted else None
    if model is not None and form is not Format.ADAPTER:
        weights = merged_weights(model)
    weights = original_names(weights, part)
    curve = curve_points(run.manifest, records)
    left_out: tuple[str, ...] = ()
    lines = "".join(json.dumps(line) + "\n" for line in curve)
    if form is not Format.SAFETENSORS:
        with made_beside(out, lambda folder: is_export(folder, run.run_id)) as folder:
            card = _card(run, records, version)
            if model is not None and form is Format.ADAPTER:
                save_adapter(model, folder, _source(run), card.task, dtype)
                write_about(folder, kept, replace(card, library="peft"))
            else:
                left_out = write_model(folder, kept, weights, dtype, card)
            metrics = folder / "metrics.jsonl"
            metrics.write_text(lines)
        metrics = out / metrics.name
    else:
        _write_file(run, out, weights, dtype, version)
        metrics = out.with_name(f"{out.stem}.metrics.jsonl")
        atomic_write(metrics, lines.encode())
    steps = sum(point["kind"] == "step" for point in curve)
    return ExportedWeights(
        weights=out, metrics=metrics, version=version, steps=steps, part=part or "", left_out=left_out
    )


def current_model(run: RunDirectory) -> nn.Module:
    """The author's model with the newest weights, in evaluation mode.

    Raises `LocalError` HP-MODEL-006 or HP-MODEL-007 if the author's module does not fit the run any more.
    """
    return newest_model(run)[1]


def newest_model(run: RunDirectory) -> tuple[int, nn.Module]:
    """`current_model`, and the number of updates in it."""
    _, weights, version = _newest(run)
    return version, _with_weights(run, weights)


def _with_weights(run: RunDirectory, weights: Mapping[str, Tensor]) -> nn.Module:
    """The author's model with `weights`, in evaluation mode. Raises as `current_model`."""
    kept = KeptFiles(run.path / FOLDER)
    own, author = kept.has_model, run.author()
    model: nn.Module = kept.model() if own else build_model(author.model, run.manifest.seed)
    if author.lora is not None:
        task = Task(author.task) if author.task and author.part == "" else None
        adapt(model, LoraSettings.parse(author.lora), task)
    if author.pixels is not None:
        from hetpeer.bootstrap.authoring.loss_module import with_scaled_pixels

        with_scaled_pixels(model, *author.pixels)
    if author.bottlenecks is not None:
        from hetpeer.bootstrap.authoring.bottlenecks import insert

        insert(model, author.bottlenecks, run.manifest.seed, (_part(run) or "") if own else "")
    try:
        if own:
            weights = original_names(weights, _part(run))
            weights = {name: weights[name] for name in model.state_dict() if name in weights}
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


def _has_adapters(run: RunDirectory) -> bool:
    """Whether the model was made with adapters; False on another machine than the author's."""
    try:
        return run.author().lora is not None
    except LocalError:
        return False


def _has_bottlenecks(run: RunDirectory) -> bool:
    """Whether the model was made with bottlenecks: their weights are in its state dict on every machine."""
    return any(f".{BOTTLENECK}." in name for name in run.manifest.state_dict)


def _source(run: RunDirectory) -> ModelSource | None:
    """Folder or id of the frozen model; None for one of a function, or if the folder is gone."""
    model = run.author().model
    try:
        return ModelSource.parse(model) if is_named(model) else None
    except LocalError:
        return None


def _part(run: RunDirectory) -> str | None:
    """Name of the model of transformers in the author's module; None on another machine than the author's."""
    try:
        return run.author().part
    except LocalError:
        return None


def _newest(run: RunDirectory, *, best: bool = False) -> tuple[list[Record], dict[str, Tensor], int]:
    """Records of the log, the weights of their newest checkpoint (or the `best` one), its version.

    While the run goes on its files may be replaced by those of a newer checkpoint: then that one is read.
    """
    while True:
        records: list[Record] = list(read_log(run.log_path))
        history = History.of(records)
        try:
            record = _best(run, records, history) if best else history.checkpoint
            weights, version = _weights(run, record or initial_record(run.manifest))
        except LocalError:
            if History.of(read_log(run.log_path)).checkpoint == history.checkpoint:
                raise
        else:
            return records, weights, version


def _best(run: RunDirectory, records: Sequence[Record], history: History) -> Record:
    """Record of the checkpoint on this disk with the lowest held-out loss.

    Raises `LocalError` HP-CKPT-002 if none was evaluated.
    """
    store = CheckpointStore(run, run.layouts())
    here = [one for one in records if one["kind"] == "checkpoint" and store.has(one)]
    best = best_of(here, {} if run.manifest.averaging else history.evaluations)
    if best is None:
        raise LocalError(
            "HP-CKPT-002",
            f"no checkpoint of {run.manifest.name} was evaluated",
            why="only multiples of --eval-every have a held-out loss, and nothing in a grouped run has",
            fix="leave --best out: then the newest checkpoint is taken",
            exit_code=ExitCode.CONFIG,
        )
    return best


def _write_file(
    run: RunDirectory, out: Path, weights: Mapping[str, Tensor], dtype: Dtype, version: int
) -> None:
    """Write `weights` as one safetensors file."""
    import torch

    from hetpeer.stages.block.torch_content import TorchContent

    kind = getattr(torch, dtype.torch_name)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    facts = {"name": run.manifest.name, "id": run.run_id, "version": version}
    content = {
        name: TorchContent(tensor, None if kind is torch.float32 else kind)
        for name, tensor in weights.items()
    }
    with GrowingFile(out) as file:
        write_tensors(file, content, {"run": json.dumps(facts), "format": "pt"})
        file.keep(out)


def _card(run: RunDirectory, records: Sequence[Record], version: int) -> ModelCard:
    """Facts about the run as of `records`."""
    manifest, author, history = run.manifest, run.author(), History.of(records)
    base, on_hub = base_of(author.model)
    shards = [shard.blake3 for shard in manifest.data.train]
    last = max(history.commits, default=None)
    evaluated = max(history.evaluations, default=None)
    shown = version if version in history.evaluations else evaluated
    right, counted = history.hits.get(-1 if shown is None else shown, (0, 0))
    return ModelCard(
        name=manifest.name,
        run_id=run.run_id,
        base=base,
        on_hub=on_hub,
        task=Task(author.task or Task.CAUSAL_LM),
        version=version,
        steps=manifest.training.steps,
        loss=None if last is None else history.commits[last]["loss"],
        evaluation=None if shown is None else history.evaluations[shown],
        accuracy=right / counted if counted else None,
        samples=sum(shard.samples for shard in manifest.data.train),
        shards=shards,
        data=blake3("".join(shards).encode()).hexdigest(),
        credit=credit_in(manifest, records).of,
    )


def _weights(run: RunDirectory, record: Record) -> tuple[dict[str, Tensor], int]:
    """The author's state dict by the checkpoint `record`, and its number of updates.

    No two entries share memory, not even tied ones.
    """
    import torch
    from safetensors.torch import load_file

    from hetpeer.stages.tracing.stored_base import restored

    manifest, layouts = run.manifest, run.layouts()
    store = CheckpointStore(run, layouts)
    version = int(record["version"])
    passes = version * manifest.training.microbatches
    found = {name: torch.tensor(count + passes) for name, count in manifest.counters.items()}
    for path in run.constant_paths():
        found |= restored(load_file(path))
    for block, layout in enumerate(layouts):
        parts = split(in_memory(store.state(record, block).numbers()[""]), layout)
        found |= {name: torch.from_numpy(part) for name, part in parts}
    weights = {
        name: found[source] if name == source else found[source].clone()
        for name, source in manifest.state_dict.items()
    }
    return weights, version
