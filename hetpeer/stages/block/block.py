"""A block at work: bundle in, bundle out, with the caller's parameters; and backward from given gradients.

Nothing is kept between calls. Gradients, microbatches and the optimizer are the caller's; autograd connects
the result to the tensors that came in. A holder of several blocks chains them with `run_range`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.block.remade_values import RemadeValues
from hetpeer.stages.block.target_hits import Predictions
from hetpeer.stages.graph.block_spec import BlockSpec, TensorSpec
from hetpeer.stages.graph.interpreter import SYMBOLS, Program
from hetpeer.stages.graph.parameter_reads import by_rows
from hetpeer.stages.operators.own_operators import Pass


class Prepared(NamedTuple):
    """A block for one number of samples; `predictions`: of an evaluation, if its hits can be counted."""

    spec: BlockSpec
    program: Program
    predictions: Predictions | None


class Block:
    """One block bound to its tensors and a device.

    `parameters`, `buffers` and `statistics` are read at each call and never written; their names are those of
    the spec. The spec is trusted: it was made by tracing/cut.py or came through `safety_check.unpack_block`.
    Raises ProtocolError if a tensor does not fit the spec.

        block = Block(spec, parameters, buffers, statistics, torch.device("cpu"))
        outputs = block.forward(bundle, data, batch=8, here=Pass(draw))  # name → tensor
    """

    def __init__(
        self,
        spec: BlockSpec,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        statistics: Mapping[str, Tensor],
        device: torch.device,
        programs: dict[tuple[int, bool], Prepared] | None = None,
        cast: Collection[str] = (),
        *,
        rows: bool = False,
    ) -> None:
        """`cast`: names of parameters that come in bfloat16 already; `rows`: tables of embeddings have sparse
        gradients (graph/parameter_reads.py).
        """
        self.spec = spec
        self._cast, self._rows = cast, rows
        self._buffers = buffers
        self._device = device
        self._owned: dict[str, Tensor] = {}
        for kind, names, specs, tensors in (
            ("parameters", spec.parameters, spec.parameter_specs, parameters),
            ("buffers", spec.buffers, spec.buffer_specs, buffers),
            ("statistics", spec.statistics, spec.statistic_specs, statistics),
        ):
            came = {
                name: replace(one, dtype="bfloat16") if name in cast else one for name, one in specs.items()
            }
            _check(f"block {spec.index}: {kind}", came, tensors)
            self._owned |= {name: tensors[fqn] for name, fqn in names.items()}
        self._programs = {} if programs is None else programs
        self._remade = RemadeValues(spec, self._owned, device)

    def on(self, parameters: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> Block:
        """The same block bound to other tensors; its prepared programs are shared."""
        return Block(
            self.spec,
            parameters,
            self._buffers,
            statistics,
            self._device,
            self._programs,
            self._cast,
            rows=self._rows,
        )

    def __repr__(self) -> str:
        spec = self.spec
        return f"<Block {spec.index} {spec.parameter_count} parameters, {len(spec.nodes)} operators>"

    def forward(
        self, bundle: Mapping[str, Tensor], data: Mapping[str, Tensor], batch: int, here: Pass
    ) -> dict[str, Tensor]:
        """Compute one microbatch of `batch` samples under the caller's grad mode. Its statistics, or the hits
        of an evaluation, go to `here`.

        `bundle` holds exactly `spec.inputs`; `data` may hold more of the author's inputs than this block
        uses. An output whose spec has no gradient is detached. Raises ProtocolError for a wrong name, shape
        or dtype, and if an operator refuses its input (a token beyond the vocabulary).
        """
        prepared = self._at(batch, evaluates=here.draw is None)
        spec = prepared.spec
        _check(f"block {spec.index}: bundle", spec.inputs, bundle)
        if unknown := bundle.keys() - spec.inputs.keys():
            raise ProtocolError(f"block {spec.index}: bundle has the unknown value {min(unknown)!r}")
        _check(f"block {spec.index}: data", spec.data, data)
        given = {name: data[name] for name in spec.data}
        if spec.recompute and torch.is_grad_enabled():
            # The pass is a pure function of its arguments: no generator state needs to be restored.
            with set_checkpoint_early_stop(
                False
            ):  # the interpreter could not tell its exception from a kernel's
                results = checkpoint(
                    *(self._compute, prepared, bundle, given, here),
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
        else:
            results = self._compute(prepared, bundle, given, here)
        return {
            name: results[name] if output.grad or not results[name].requires_grad else results[name].detach()
            for name, output in spec.outputs.items()
        }

    def _compute(
        self, prepared: Prepared, bundle: Mapping[str, Tensor], data: Mapping[str, Tensor], here: Pass
    ) -> dict[str, Tensor]:
        """Run the program on the bundle; floats that cross blocks are in the dtypes that the spec states."""
        spec, program = prepared.spec, prepared.program
        entering = {name: bundle[name].to(SYMBOLS["dtype"][s.dtype]) for name, s in spec.entering.items()}
        values = {**self._owned, **entering, **data}
        with torch.autocast(self._device.type, torch.bfloat16, enabled=spec.autocast):
            if self._remade and torch.is_grad_enabled() and not spec.recompute:
                with self._remade.forward() as observe:
                    results = program.run(values, here, observe)
            else:
                results = program.run(values, here)
            if prepared.predictions is not None:
                here.hits = prepared.predictions.hits(results)
        return {name: results[name].to(SYMBOLS["dtype"][s.dtype]) for name, s in spec.outputs.items()}

    def sized(self, batch: int) -> BlockSpec:
        """The spec for `batch` samples: every size in it is a number."""
        return self._at(batch).spec

    def _at(self, batch: int, *, evaluates: bool = False) -> Prepared:
        """Spec and program for `batch` samples; a run has one or two such numbers."""
        if (batch, evaluates) not in self._programs:
            spec = self.spec.at(batch)
            predictions = Predictions.of(spec) if evaluates else None
            kept = {*spec.outputs, *(predictions.names if predictions else ())}
            nodes = by_rows(spec) if self._rows else spec.nodes
            program = Program(nodes, kept, self._device)
            self._programs[batch, evaluates] = Prepared(spec, program, predictions)
        return self._programs[batch, evaluates]


def run_range(
    blocks: Sequence[Block], bundle: Mapping[str, Tensor], data: Mapping[str, Tensor], batch: int, here: Pass
) -> dict[str, Tensor]:
    """Compute consecutive blocks of one holder; autograd runs through them. Errors as in `Block.forward`."""
    out = dict(bundle)
    for block in blocks:
        out = block.forward(out, data, batch, here)
    return out


def flat_views(spec: BlockSpec, flat: Tensor) -> dict[str, Tensor]:
    """Parameter name → view into the first part of `flat`, a float32 vector in the order of the spec.

    The views share memory with `flat` but not its autograd history: each may become a leaf of its own. `flat`
    may also hold gradients, with or without statistics behind them, or moments. Raises ProtocolError if it is
    too short.
    """
    return _views(spec, spec.parameter_specs, flat)


def statistic_views(spec: BlockSpec, flat: Tensor) -> dict[str, Tensor]:
    """Statistic name → view into `flat`, as `flat_views`."""
    return _views(spec, spec.statistic_specs, flat)


def _views(spec: BlockSpec, specs: Mapping[str, TensorSpec], flat: Tensor) -> dict[str, Tensor]:
    """Views of `flat` by name, in the order of `specs`. Raises `ProtocolError` if `flat` is too short."""
    counts = [part.count for part in specs.values()]
    if flat.dim() != 1 or len(flat) < sum(counts) or flat.dtype != torch.float32:
        what = f"{flat.dtype} {tuple(flat.shape)}"
        raise ProtocolError(f"block {spec.index} has {sum(counts)} float32 values there, not {what}")
    parts = torch.split(flat[: sum(counts)], counts)
    return {
        name: part.view(part_spec.sizes).detach()
        for (name, part_spec), part in zip(specs.items(), parts, strict=True)
    }


def _check(where: str, specs: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> None:
    for name, spec in specs.items():
        if name not in tensors:
            raise ProtocolError(f"{where}: {name!r} is missing")
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != spec.shape or dtype != spec.dtype:
            got, wanted = f"{dtype} {list(tensor.shape)}", f"{spec.dtype} {list(spec.shape)}"
            raise ProtocolError(f"{where}: {name!r} is {got} and should be {wanted}")


class _Seeded(torch.autograd.Function):
    """A zero whose derivative with respect to each output is that output's seed."""

    @staticmethod
    def forward(ctx: Any, seeds: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.seeds = seeds
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.seeds


def backpropagate(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], seeds: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of `leaves` if each output has its seed as gradient; None for leaves out of reach.

    The same as `torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)`, which imports sympy to
    compare shapes: half a second and 37 MiB in every worker.
    """
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        _Seeded.apply(seeds, *outputs),  # type: ignore[no-untyped-call]
        leaves,
        allow_unused=True,
    )
    return found
