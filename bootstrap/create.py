"""`hetpeer init`: from the author's model and texts to a run directory, ready to be served.

Everything is made in a folder beside the target and renamed at the end: the run directory is complete or not there.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hetpeer.bootstrap.author import Author, absolute_reference, build_model
from hetpeer.bootstrap.files import atomic_write, disk_errors, sync_folder
from hetpeer.bootstrap.manifest import Manifest, TrainingSettings, public_bytes, sign, validated
from hetpeer.bootstrap.rundir import FOLDERS, RunDirectory
from hetpeer.dht.errors import ExitCode, LocalError
from hetpeer.dht.identity import Identity
from hetpeer.stages.data.tokens import (
    VOCABULARY,
    python_standard_library_paths,
    require_population,
    write_shards,
)
from hetpeer.stages.execution import state

if TYPE_CHECKING:
    from torch import Tensor

    from hetpeer.stages.graph.spec import BlockSpec

HELDOUT_FRACTION = 0.1
DEFAULT_STAGES = 2

Fields = dict[str, Any]


def create_run(
    directory: Path,
    *,
    model: str,
    data: Sequence[Path] = (),
    name: str | None = None,
    seed: int = 0,
    sequence_length: int = 64,
    stages: Sequence[int] = (),
    training: TrainingSettings | None = None,
) -> RunDirectory:
    """Make a run directory from the author's function `model` ("module.py:function") and the texts under `data`.

    `stages` has one number for each way in which clusters cut the model: cluster c is a pipeline of
    `stages[c % len(stages)]` stages. Without `data` the texts are Python's standard library. Raises `LocalError`:
    HP-MODEL-*, HP-DATA-*, HP-RUN-001 (a setting), HP-DISK-*; then nothing is left at `directory`.
    """
    training = training or TrainingSettings()
    reference = absolute_reference(model)
    with _made_beside(directory) as folder:
        for part in FOLDERS:
            (folder / part).mkdir()
        shards = _write_data(folder, data or python_standard_library_paths(), sequence_length)
        specs, tensors = _cut_model(reference, seed, training.microbatch_size, sequence_length)
        owner_key = _write_owner_key(folder)
        fields: Fields = {
            "name": name or directory.resolve().name.lower(),
            "seed": seed,
            "owner": public_bytes(owner_key),
            "coordinators": [Identity.create(folder / "identity.key").peer_id],
            "blocks": [_write_block(folder, spec, tensors) for spec in specs],
            "data": shards,
            "training": training.model_dump(),
            "layouts": _layouts(specs, stages),
        }
        atomic_write(folder / "manifest.hetpeer", sign(validated(Manifest, fields), owner_key))
        author = Author(model=reference, data=tuple(str(path.resolve()) for path in data))
        atomic_write(folder / "author.json", author.model_dump_json(indent=1).encode() + b"\n")
    return RunDirectory.open(directory)


@contextmanager
def _made_beside(directory: Path) -> Iterator[Path]:
    """A folder that becomes `directory` if the body succeeds and vanishes if it does not."""
    if directory.is_dir() and any(directory.iterdir()):
        raise LocalError(
            "HP-DISK-003",
            f"{directory} exists and is not empty",
            why="hetpeer init never writes over a run",
            fix="choose another directory, or remove this one",
            exit_code=ExitCode.CONFIG,
        )
    target = directory.resolve()
    with disk_errors(directory):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        with disk_errors(directory):
            folder.chmod(0o755)
            for part in (*folder.iterdir(), folder):
                if part.is_dir():
                    sync_folder(part)
            folder.rename(target)
            sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(folder)
        raise


def _write_data(folder: Path, paths: Sequence[Path], sequence_length: int) -> Fields:
    with disk_errors(folder / "data"):
        train, heldout = write_shards(paths, folder / "data", HELDOUT_FRACTION)
    for what, shards in (("the training text", train), ("the held-out tenth of the text", heldout)):
        require_population(sum(shard.tokens for shard in shards), sequence_length, what)
    return {
        "train": [asdict(shard) for shard in train],
        "heldout": [asdict(shard) for shard in heldout],
        "sequence_length": sequence_length,
        "vocabulary": VOCABULARY,
    }


def _cut_model(
    reference: str, seed: int, microbatch_size: int, sequence_length: int
) -> tuple[list[BlockSpec], Mapping[str, Tensor]]:
    """The model's blocks and its tensors as the seed made them."""
    import torch

    from hetpeer.stages.graph.cut import cut_blocks
    from hetpeer.stages.graph.trace import trace

    built = build_model(reference, seed)
    example = torch.zeros((microbatch_size, sequence_length), dtype=torch.int64)
    dag = trace(built, {"tokens": example, "targets": example.clone()})
    return cut_blocks(dag), dag.tensors


def _write_block(folder: Path, spec: BlockSpec, tensors: Mapping[str, Tensor]) -> Fields:
    """Write a block's graph, initial state and constants; returns its manifest entry."""
    from safetensors.torch import save

    from hetpeer.stages.graph.wire import pack_block

    initial = _initial_state(spec, tensors)
    state_bytes = state.dump(initial, spec.index, state.layout_of(spec))
    entry: Fields = {
        "index": spec.index,
        "graph": _write_file(folder / "graph" / f"block-{spec.index:03}.graph", pack_block(spec)),
        "state": _write_file(folder / "state" / f"initial-{spec.index:03}.safetensors", state_bytes),
        "state_digest": initial.digest(),
        "parameter_count": spec.parameter_count,
        "parameter_bytes": spec.parameter_bytes,
        "flops_forward": spec.flops_forward,
        "activation_bytes": spec.activation_bytes,
        "output_bytes": sum(output.nbytes for output in spec.outputs.values()),
    }
    if spec.buffer_specs:
        constants = {name: tensors[name].detach().contiguous() for name in spec.buffer_specs}
        path = folder / "state" / f"buffers-{spec.index:03}.safetensors"
        entry["buffers"] = _write_file(path, save(constants))
    return entry


def _initial_state(spec: BlockSpec, tensors: Mapping[str, Tensor]) -> state.BlockState:
    import numpy as np

    vector = np.zeros(spec.parameter_count, dtype=np.float32)
    for name, part in state.split(vector, state.layout_of(spec)):
        part[...] = tensors[name].detach().numpy()
    return state.BlockState.initial(vector)


def _write_file(path: Path, content: bytes) -> Fields:
    atomic_write(path, content)
    return {"name": path.name, "blake3": blake3(content).hexdigest(), "bytes": len(content)}


def _write_owner_key(folder: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    atomic_write(folder / "owner.key", key.private_bytes_raw(), mode=0o600)
    return key


def _layouts(specs: Sequence[BlockSpec], stages: Sequence[int]) -> list[list[tuple[int, int]]]:
    from hetpeer.stages.graph.cut import balanced_ranges

    return [balanced_ranges(specs, count) for count in stages or [min(DEFAULT_STAGES, len(specs))]]
