"""The model's part of a run directory: traced, cut, written block by block, with what export needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpeer.bootstrap.authoring.frozen_base import FLOAT32, in_form
from hetpeer.bootstrap.authoring.sample_weigher import Weigh
from hetpeer.bootstrap.run.durable_files import GrowingFile, atomic_write, hash_file
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.dht.base.errors import ExitCode, LocalError, ProtocolError
from hetpeer.stages.block.block_state import Joined, Numbers, State, Whole, digest_of, layout_of
from hetpeer.stages.block.state_file import write_state
from hetpeer.stages.block.tensor_file import write_tensors
from hetpeer.stages.data.shards import Arrays
from hetpeer.stages.graph.parameter_reads import cast_count, looked_up_count

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hetpeer.stages.graph.block_spec import BlockSpec
    from hetpeer.stages.tracing.trace import OpDag

DEFAULT_STAGES = 2

Fields = dict[str, Any]

_log = logging.getLogger(__name__)


def quietly(_line: str) -> None:
    """Ignore a progress line."""


def ship(
    folder: Path,
    model: nn.Module,
    example: Arrays,
    training: TrainingSettings,
    stages: Sequence[int],
    tell: Callable[[str], None] = quietly,
    *,
    frozen_dtype: str = FLOAT32,
    bottleneck: int | None = None,
    seed: int = 0,
) -> tuple[Fields, Weigh | None]:
    """Write the blocks of `model` under `folder`; returns the manifest's entries about them, and the weights
    that its loss gives to samples.

    Besides these there are "recompute": what `training` says, or True if the model uses torch's checkpoints,
    "bottlenecks": those that were put between its stages, or None, and "one_size": whether the model computes
    full microbatches alone. `example`: the first microbatch.
    `frozen_dtype`: form of what is frozen; the model is rounded to it. `bottleneck`: features that cross
    between stages; `seed` draws how. `tell` gets a line before each long part. Raises `LocalError`
    HP-MODEL-*, HP-RUN-001.
    """
    import torch

    from hetpeer.bootstrap.authoring.bottlenecks import narrowed
    from hetpeer.bootstrap.model_checks.equivalence import loss_of
    from hetpeer.stages.tracing.assemble import ComputeMode
    from hetpeer.stages.tracing.counted_targets import counted_targets
    from hetpeer.stages.tracing.cut import balanced_ranges, cut_blocks
    from hetpeer.stages.tracing.graph_size import check_block_sizes
    from hetpeer.stages.tracing.stand_ins.checkpoints import plain_checkpoints
    from hetpeer.stages.tracing.trace import trace

    first = {name: torch.from_numpy(array) for name, array in example.items()}
    autocast = training.dtype == "bf16"
    tell("tracing the model")
    with plain_checkpoints() as checkpoints:
        dag = trace(model, first, autocast=autocast)
    if checkpoints.used and not training.recompute:
        tell(
            "the model uses gradient checkpointing, so its blocks recompute their forward pass (--recompute)"
        )
    mode = ComputeMode(autocast=autocast, recompute=training.recompute or checkpoints.used)
    if not dag.dynamic and training.batch_size % training.microbatch_size:
        raise LocalError(
            "HP-MODEL-009",
            "the model computes microbatches of one size only",
            why=f"{training.batch_size} samples are no multiple of {training.microbatch_size}",
            fix="choose a --batch-size that is, or let no size in forward() be a constant that is the "
            "batch's",
            exit_code=ExitCode.CONFIG,
        )
    if frozen_dtype != FLOAT32:
        dag = in_form(model, first, dag, frozen_dtype, autocast=mode.autocast, tell=tell)
    last = training.samples_of(training.microbatches - 1)
    tell(f"cutting its {len(dag.nodes)} operator calls into blocks")
    at_least = max(stages, default=1)
    specs = cut_blocks(dag, mode=mode, at_least=at_least)
    layouts = [balanced_ranges(specs, count) for count in stages or [min(DEFAULT_STAGES, len(specs))]]
    chosen = None
    if bottleneck is not None:
        before = loss_of(model, first, autocast=autocast)
        with plain_checkpoints():
            dag, specs, chosen = narrowed(
                model, first, dag, layouts, bottleneck, mode, at_least=at_least, seed=seed, tell=tell
            )
        after = loss_of(model, first, autocast=autocast)
        tell(f"bottlenecks change the loss of the first microbatch from {before:.6g} to {after:.6g}")
    check_block_sizes(specs)
    _check_last(specs, last)
    with plain_checkpoints():
        _compare(folder, model, first, dag, specs, tell)
    tell(f"writing {len(specs)} block{'' if len(specs) == 1 else 's'}")
    targets = counted_targets(dag, first)
    fields: Fields = {
        "blocks": [_write_block(folder, spec, dag, model) for spec in specs],
        "layouts": layouts,
        "ties": _ties(specs),
        "counters": dict(dag.counters),
        "state_dict": dict(dag.state_dict),
        "rest": _write_tensors(folder / "state" / "rest.safetensors", dag.rest) if dag.rest else None,
        "recompute": mode.recompute,
        "bottlenecks": chosen,
        "one_size": not dag.dynamic,
    }
    return fields, None if targets is None else targets.weights


def _compare(
    folder: Path,
    model: nn.Module,
    first: Mapping[str, Tensor],
    dag: OpDag,
    specs: Sequence[BlockSpec],
    tell: Callable[[str], None],
) -> None:
    """Compare the blocks with the model on the microbatch `first`, in the memory that there is."""
    from hetpeer.bootstrap.authoring.large_model import kept_in_files
    from hetpeer.bootstrap.model_checks.equivalence import check_likeness, least_memory_of, memory_of
    from hetpeer.stages.block.device import survey

    least, free = least_memory_of(specs), survey().ram_free_bytes
    if memory_of(specs) <= free:
        tell("comparing the blocks with the model on one microbatch")
        check_likeness(model, first, dag, specs)
    elif least <= free:
        tell("comparing the blocks with the model on one microbatch, block by block for lack of memory")
        keep = kept_in_files(model, folder, (free - least) // 4)
        check_likeness(model, first, dag, specs, keep)
    else:
        _log.warning(
            "the blocks are not compared with the model: that takes %.1f GiB of memory, and %.1f GiB are "
            "free; make sure that the model has no hooks and no torch.autograd.Function of your own",
            least / 2**30,
            free / 2**30,
        )


def _check_last(specs: Sequence[BlockSpec], samples: int) -> None:
    """Check that the last microbatch of a step is not too small for the model."""
    from hetpeer.stages.graph.safety_check import check_at
    from hetpeer.stages.graph.structure_check import DEFAULT_LIMITS

    try:
        for spec in specs:
            check_at(spec, samples, DEFAULT_LIMITS)
    except ProtocolError as error:
        raise LocalError(
            "HP-MODEL-009",
            f"the model cannot compute the last microbatch, of {samples} samples",
            why=error.detail,
            fix="choose a --batch-size that is a multiple of --microbatch-size",
            exit_code=ExitCode.CONFIG,
        ) from error


def _ties(specs: Sequence[BlockSpec]) -> list[Fields]:
    """Positions of shared parameters in the blocks' vectors."""
    uses: dict[str, list[tuple[int, int, int]]] = {}
    for spec in specs:
        begin = 0
        for name, tensor in spec.parameter_specs.items():
            uses.setdefault(name, []).append((spec.index, begin, begin + tensor.count))
            begin += tensor.count
    return [{"uses": places} for places in uses.values() if len(places) > 1]


def _write_block(folder: Path, spec: BlockSpec, dag: OpDag, model: nn.Module) -> Fields:
    """Write a block's graph, initial state and constants; returns its manifest entry.

    Parameters of a large model are read from there from now on.
    """
    from hetpeer.stages.graph.block_wire import pack_block

    tensors = dag.tensors
    initial = _Initial([tensors[name] for name, _ in layout_of(spec)])
    full = spec.at(spec.batch)
    entry: Fields = {
        "index": spec.index,
        "graph": _write_file(folder / "graph" / f"block-{spec.index:03}.graph", pack_block(spec)),
        "state": _write_state(folder / "state" / f"initial-{spec.index:03}.safetensors", initial, spec),
        "state_digest": digest_of(initial.numbers(), 0, 0),
        "parameter_count": spec.parameter_count,
        "vector_count": spec.vector_count,
        "cast_count": cast_count(spec),
        "looked_up_count": looked_up_count(spec),
        "parameter_bytes": spec.parameter_bytes,
        "flops_forward": spec.flops_forward,
        "activation_bytes": spec.activation_bytes,
        "output_bytes": sum(output.nbytes for output in full.outputs.values()),
    }
    if spec.buffer_specs:
        constants = {name: tensors[name] for name in spec.buffer_specs}
        entry["buffers"] = _write_tensors(
            folder / "state" / f"buffers-{spec.index:03}.safetensors", constants
        )
    _give_back(folder / "state" / entry["state"]["name"], spec, dag, model)
    return entry


def _give_back(path: Path, spec: BlockSpec, dag: OpDag, model: nn.Module) -> None:
    """Free the disk of those parameters of `spec` that lie in files of their own: they are in `path`, too."""
    from hetpeer.bootstrap.authoring.large_model import lies_in_file, read_from

    twice = {name: [dag.tensors[name]] for name in spec.parameter_specs if lies_in_file(dag.tensors[name])}
    for name, parameter in model.named_parameters():
        if (own := dag.state_dict.get(name, name)) in twice:
            twice[own].append(parameter)
    if twice:
        read_from(path, twice)


class _Initial:
    """The `State` of a block with which a run begins: the author's tensors, not a copy."""

    version, averages = 0, 0

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parameters = Joined([Whole(tensor.numpy().reshape(-1)) for tensor in tensors])

    def numbers(self) -> dict[str, Numbers]:
        """The parameters."""
        return {"": self._parameters}


def _write_state(path: Path, state: State, spec: BlockSpec) -> Fields:
    with GrowingFile(path) as file:
        write_state(file, state, spec.index, layout_of(spec))
        file.keep(path)
    return _facts(path)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Fields:
    from hetpeer.stages.block.torch_content import TorchContent

    with GrowingFile(path) as file:
        write_tensors(file, {name: TorchContent(tensor) for name, tensor in tensors.items()}, {})
        file.keep(path)
    return _facts(path)


def _write_file(path: Path, content: bytes) -> Fields:
    atomic_write(path, content)
    return _facts(path)


def _facts(path: Path) -> Fields:
    """The manifest's entry of a file."""
    return {"name": path.name, "blake3": hash_file(path), "bytes": path.stat().st_size}
