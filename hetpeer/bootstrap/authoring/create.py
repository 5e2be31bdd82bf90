"""`hetpeer init`: from the author's model and data to a run directory, ready to be served.

Everything is made in a folder beside the target and renamed at the end: the run directory is complete or not
there. The data that `--data` names are written as shards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel

from hetpeer.bootstrap.authoring.author_model import author_model
from hetpeer.bootstrap.authoring.frozen_base import FLOAT32
from hetpeer.bootstrap.authoring.model_on_data import ModelOnData
from hetpeer.bootstrap.authoring.package_model import DEFAULT_STAGES, quietly, ship
from hetpeer.bootstrap.authoring.run_data import DataOptions, absolute_data
from hetpeer.bootstrap.authoring.sample_weigher import SampleWeigher, check_steps
from hetpeer.bootstrap.authoring.user_code import LOSS, absolute_reference
from hetpeer.bootstrap.pretrained.adapters import LoraSettings, adapt
from hetpeer.bootstrap.pretrained.tasks import Task
from hetpeer.bootstrap.run.durable_files import atomic_write, made_beside
from hetpeer.bootstrap.run.manifest import Manifest, public_bytes, sign, validated
from hetpeer.bootstrap.run.manifest_files import Name
from hetpeer.bootstrap.run.owner_signature import Coordinators, Count, Positive
from hetpeer.bootstrap.run.run_directory import FOLDERS, Author, RunDirectory
from hetpeer.bootstrap.run.settings import (
    AdmissionSettings,
    AveragingSettings,
    LinkSettings,
    TrainingSettings,
    TrustSettings,
)
from hetpeer.bootstrap.samples.source import Wanted
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.peer_identity import Identity

Fields = dict[str, Any]


class _Asked(BaseModel):
    """Settings that are needed before there is a manifest to validate."""

    name: Name
    coordinators: Coordinators
    seed: Count
    sequence_length: Positive


def create_run(
    directory: Path,
    *,
    model: str,
    task: Task | None = None,
    classes: int | None = None,
    loss: str | None = None,
    lora: str | None = None,
    frozen_dtype: str = FLOAT32,
    bottleneck: int | None = None,
    data: Sequence[Path | str] = (),
    eval_data: Sequence[Path | str] = (),
    name: str | None = None,
    seed: int = 0,
    sequence_length: int = 64,
    reading: DataOptions | None = None,
    stages: Sequence[int] = (),
    training: TrainingSettings | None = None,
    links: LinkSettings | None = None,
    averaging: AveragingSettings | None = None,
    reliable: Sequence[str] = (),
    admission: AdmissionSettings | None = None,
    trust: TrustSettings | None = None,
    tell: Callable[[str], None] = quietly,
) -> RunDirectory:
    """Make a run directory from the author's functions `model` and `loss`, each a "module.py:function".

    `model` may also be the name of a model of transformers, "hf:FOLDER_OR_ID", which is trained for `task`,
    with `classes` classes if it is a classifier; None: as its checkpoint says. With `lora`
    (`LoraSettings.parse`) adapters are trained, and the model itself is frozen. What is frozen is stored in
    `frozen_dtype` (`FLOAT32` or one of stored_base.FORMS). `bottleneck` features cross each border between
    stages that can be narrowed; None: the model stays as it is.

    `data` is one such function, which yields the samples, or paths of files, which `reading` turns into
    samples of `sequence_length` tokens; without it, the texts are Python's standard library. `eval_data` is
    evaluated; without it a part of `data` is held out. `stages` lists numbers of stages: cluster c is a
    pipeline of `stages[c % len(stages)]` stages. With `averaging` the run is grouped. `reliable` are the ids
    of the other reliable peers. `tell` gets a line before each part that may take long. Raises `LocalError`:
    HP-MODEL-*, HP-DATA-*, HP-RUN-001 (a setting), HP-DISK-*; then nothing is left at `directory`.
    """
    training = training or TrainingSettings()
    _check_stage_bounds(training, stages[0] if stages else DEFAULT_STAGES)
    reading = reading or DataOptions()
    author = Author(
        model=absolute_reference(model),
        task=task,
        loss=None if loss is None else absolute_reference(loss, LOSS),
        data=absolute_data(data),
        eval_data=absolute_data(eval_data, "--eval-data"),
        lora=lora,
    )
    adapters = None if lora is None else LoraSettings.parse(lora)
    if bottleneck is not None:
        _check_bottleneck(bottleneck, trains_all=adapters is None and frozen_dtype == FLOAT32)
    with made_beside(directory) as folder:
        asked: Fields = {
            "name": name or name_of(directory),
            "coordinators": [Identity.create(folder / "identity.key").peer_id, *reliable],
            "seed": seed,
        }
        validated(_Asked, {**asked, "sequence_length": sequence_length})
        for part in FOLDERS:
            (folder / part).mkdir()
        tell("building the model")
        own = author_model(author, reading, classes=classes, seed=seed, folder=folder, tell=tell)
        if adapters:
            adapted = adapt(own.module, adapters, own.task if own.part == "" else None)
            tell(f"adapted layers: {adapted}; everything else is frozen")
        tell("reading the first samples")
        wanted = Wanted(length=sequence_length, most=reading.max_samples, seed=seed, tell=tell)
        on_data = ModelOnData.of(own, author, reading, wanted, training)
        shipped, counted = ship(
            folder,
            on_data.module,
            on_data.example,
            training,
            stages,
            tell,
            frozen_dtype=frozen_dtype,
            bottleneck=bottleneck,
            seed=seed,
        )
        bottlenecks, one_size = shipped.pop("bottlenecks"), shipped.pop("one_size")
        training = training.model_copy(update={"recompute": shipped.pop("recompute")})
        weigher = SampleWeigher(on_data.given or counted)
        on_data.compare_batch(weigher, training, shipped["blocks"], tell)
        tell("reading the data")
        written = on_data.write(folder / "data", weigher, training.on_bad_sample, tell)
        whole = bool(eval_data) or own.has_evaluation
        owner_key = _write_owner_key(folder)
        fields: Fields = {
            **asked,
            "data": written,
            "training": _evaluating(
                training, reading.eval_samples, written["heldout"], whole=whole, one_size=one_size
            ),
            "links": links or LinkSettings(),
            "averaging": averaging,
            "admission": admission or AdmissionSettings(),
            "trust": trust or TrustSettings(),
            "owner": public_bytes(owner_key),
            **shipped,
        }
        manifest = validated(Manifest, fields)
        check_steps(manifest.data_plan, weigher.found(), training.steps)
        atomic_write(folder / "manifest.hetpeer", sign(manifest, owner_key))
        chats = own.tokenizer is not None and own.tokenizer.chatted
        author = author.model_copy(
            update={
                "task": own.task,
                "part": own.part,
                "chats": chats,
                "pixels": own.pixels,
                "bottlenecks": bottlenecks,
            }
        )
        atomic_write(folder / "author.json", author.model_dump_json(indent=1).encode() + b"\n")
    return RunDirectory.open(directory)


def _check_stage_bounds(training: TrainingSettings, stages: int) -> None:
    """Raise `LocalError` HP-RUN-001 if no stage may be as stale as steps are."""
    try:
        training.stage_bounds(stages)
    except ValueError as error:
        raise LocalError(
            "HP-RUN-001",
            "--last-staleness does not go with the other options",
            why=str(error),
            fix="give more --stages, less --staleness, or more --last-staleness",
            exit_code=ExitCode.CONFIG,
        ) from error


def _check_bottleneck(rank: int, *, trains_all: bool) -> None:
    """Raise `LocalError` HP-RUN-001 for a rank below 1, or if parts of the model are frozen."""
    if rank >= 1 and trains_all:
        return
    raise LocalError(
        "HP-RUN-001",
        f"--bottleneck {rank} cannot be",
        why="at least one feature must cross a border"
        if trains_all
        else "frozen layers cannot learn to do with fewer features",
        fix="give a number from 1 on" if trains_all else "leave --lora and --frozen-dtype out",
        exit_code=ExitCode.CONFIG,
    )


def _evaluating(
    training: TrainingSettings,
    most: int | None,
    heldout: Sequence[Mapping[str, Any]],
    *,
    whole: bool,
    one_size: bool,
) -> TrainingSettings:
    """`training` with evaluations of at most `most` samples of the `heldout` shards.

    None: of all samples if `whole`, otherwise of as many as it says, if there are so many. A model of
    `one_size` evaluates full microbatches alone. Raises `LocalError` HP-MODEL-009 if `most` does not allow
    that, or if there are fewer samples than one has.
    """
    samples = sum(shard["samples"] for shard in heldout)
    wanted = most or (samples if whole else training.eval_samples)
    if wanted is None:
        return training
    wanted, size = min(wanted, samples), training.microbatch_size
    rest = wanted % size if one_size else 0
    if rest and (most or rest == wanted):
        raise LocalError(
            "HP-MODEL-009",
            "the model computes microbatches of one size only",
            why=f"an evaluation of {wanted} samples is no multiple of {size}",
            fix="choose --eval-samples that are, or let no size in forward() be a constant that is the "
            "batch's",
            exit_code=ExitCode.CONFIG,
        )
    return training.evaluating(wanted - rest)


def name_of(directory: Path) -> str:
    """Default name of a run in `directory`: the folder's name without characters that names cannot have."""
    return re.sub(r"[^a-z0-9._-]+", "-", directory.resolve().name.lower()).strip("._-")[:64] or "run"


def _write_owner_key(folder: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    atomic_write(folder / "owner.key", key.private_bytes_raw(), mode=0o600)
    return key
