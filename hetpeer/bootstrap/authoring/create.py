"""`hetpeer init`: from the author's model and data to a run directory, ready to be served.

Everything is made in a folder beside the target and renamed at the end: the run directory is complete or not
there. The data that `--data` names are written as shards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel

from hetpeer.bootstrap.authoring.author_model import author_model
from hetpeer.bootstrap.authoring.data_fit import (
    check_borders,
    check_extremes,
    check_vocabulary,
    telling_example,
)
from hetpeer.bootstrap.authoring.frozen_base import FLOAT32
from hetpeer.bootstrap.authoring.package_model import quietly, ship
from hetpeer.bootstrap.authoring.run_data import (
    DataOptions,
    absolute_data,
    is_function,
    source_of,
)
from hetpeer.bootstrap.authoring.sample_weigher import SampleWeigher, check_steps
from hetpeer.bootstrap.authoring.user_code import (
    LOSS,
    absolute_reference,
    weights_by_loss,
    with_loss,
)
from hetpeer.bootstrap.pretrained.adapters import LoraSettings, adapt
from hetpeer.bootstrap.pretrained.kept import FOLDER, KeptFiles
from hetpeer.bootstrap.pretrained.tasks import Task
from hetpeer.bootstrap.run.durable_files import atomic_write, disk_errors, made_beside
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
from hetpeer.bootstrap.samples.source import Source, Wanted
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.stages.data.extremes import Extremes

if TYPE_CHECKING:
    from torch import nn

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
    `frozen_dtype` (`FLOAT32` or one of stored_base.FORMS).

    `data` is one such function, which yields the samples, or paths of files, which `reading` turns into
    samples of `sequence_length` tokens; without it, the texts are Python's standard library. `eval_data` is
    evaluated; without it a part of `data` is held out. `stages` lists numbers of stages: cluster c is a
    pipeline of `stages[c % len(stages)]` stages. With `averaging` the run is grouped. `reliable` are the ids
    of the other reliable peers. `tell` gets a line before each part that may take long. Raises `LocalError`:
    HP-MODEL-*, HP-DATA-*, HP-RUN-001 (a setting), HP-DISK-*; then nothing is left at `directory`.
    """
    training = training or TrainingSettings()
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
        own = author_model(
            author,
            reading,
            classes=classes,
            seed=seed,
            kept=KeptFiles(folder / FOLDER),
            tell=tell,
        )
        if adapters:
            task_of_it = own.task if own.part == "" else None
            tell(f"adapted layers: {adapt(own.module, adapters, task_of_it)}; everything else is frozen")
        wanted = Wanted(length=sequence_length, most=reading.max_samples, seed=seed, tell=tell)
        tell("reading the first samples")
        source = source_of(author, reading, wanted, own.tokenizer, own.module, own.task, training, own.images)
        example = source.example(training.microbatch_size)
        given = weights_by_loss(own.module, author.loss, example)
        built = with_loss(own.module, author.loss, example)
        example = telling_example(built, source, training.microbatch_size)
        if own.tokenizer and not is_function(author.data):
            check_vocabulary(built, example, own.tokenizer.vocabulary, own.tokenizer.path)
        if reading.packed:
            check_borders(built, example)
        owner_key = _write_owner_key(folder)
        shipped, counted = ship(folder, built, example, training, stages, tell, frozen_dtype=frozen_dtype)
        training = training.model_copy(update={"recompute": shipped.pop("recompute")})
        weigher = SampleWeigher(given or counted)
        _compare_batch(built, source, weigher, training, shipped["blocks"], tell)
        tell("reading the data")
        extremes = Extremes()
        with disk_errors(folder):
            written = source.write(folder / "data", [extremes.look, weigher.look])
            written["weights"] = weigher.write(folder / "data")
        try:
            check_extremes(built, example, extremes.found())
        except LocalError as error:
            if training.on_bad_sample != "skip":
                raise
            tell(f"such samples will be skipped (--on-bad-sample skip): {error.what}; {error.why}")
        fields: Fields = {
            **asked,
            "data": written,
            "training": _evaluating(
                training,
                reading.eval_samples,
                written["heldout"],
                whole=bool(eval_data) or own.has_evaluation,
            ).model_dump(),
            "links": (links or LinkSettings()).model_dump(),
            "averaging": averaging and averaging.model_dump(),
            "admission": (admission or AdmissionSettings()).model_dump(),
            "trust": (trust or TrustSettings()).model_dump(),
            "owner": public_bytes(owner_key),
            **shipped,
        }
        manifest = validated(Manifest, fields)
        check_steps(manifest.data_plan, weigher.found(), training.steps)
        atomic_write(folder / "manifest.hetpeer", sign(manifest, owner_key))
        chats = own.tokenizer is not None and own.tokenizer.chatted
        author = author.model_copy(update={"task": own.task, "part": own.part, "chats": chats})
        atomic_write(folder / "author.json", author.model_dump_json(indent=1).encode() + b"\n")
    return RunDirectory.open(directory)


def _compare_batch(
    model: nn.Module,
    source: Source,
    weigher: SampleWeigher,
    training: TrainingSettings,
    blocks: Sequence[Mapping[str, int]],
    tell: Callable[[str], None],
) -> None:
    """Say so if a batch is not the same as its microbatches."""
    from hetpeer.bootstrap.authoring.whole_batch import MOST, compare_split, small_last_part
    from hetpeer.stages.block.device import survey

    sizes = [training.samples_of(number) for number in range(training.microbatches)]
    if warning := small_last_part(model, sizes):
        tell(warning)
    takes = sum(2 * block["parameter_bytes"] + MOST * block["activation_bytes"] for block in blocks)
    if training.microbatches == 1 or takes > survey().ram_free_bytes:
        return
    tell("comparing a batch with its microbatches")
    batch = source.example(min(training.batch_size, MOST * training.microbatch_size))
    split = compare_split(model, batch, training.microbatch_size, weigher.of(batch))
    if split is not None and not split.is_same:
        tell(str(split))


def _evaluating(
    training: TrainingSettings, most: int | None, heldout: Sequence[Mapping[str, Any]], *, whole: bool
) -> TrainingSettings:
    """`training` with evaluations of at most `most` samples of the `heldout` shards.

    None: of all samples if `whole`, otherwise of as many as it says, if there are so many.
    """
    samples = sum(shard["samples"] for shard in heldout)
    wanted = most or (samples if whole else training.eval_samples)
    return training if wanted is None else training.evaluating(min(wanted, samples))


def name_of(directory: Path) -> str:
    """Default name of a run in `directory`: the folder's name without characters that names cannot have."""
    return re.sub(r"[^a-z0-9._-]+", "-", directory.resolve().name.lower()).strip("._-")[:64] or "run"


def _write_owner_key(folder: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    atomic_write(folder / "owner.key", key.private_bytes_raw(), mode=0o600)
    return key
