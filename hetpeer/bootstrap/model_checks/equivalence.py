"""Equivalence of the blocks and the author's module: one microbatch by both, before the manifest is signed.

A trace records operators only. It silently drops everything else that decides a gradient (a custom backward,
a hook) or a loss (Python state, a cast by autocast). So the author's machine compares the numbers themselves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hetpeer.bootstrap.model_checks.block_gradients import BlockGradients
from hetpeer.bootstrap.model_checks.drawn_dropout import DrawnDropout
from hetpeer.dht.base.errors import ExitCode, LocalError, ProtocolError
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.graph_cost import ANY_DRAW, activation_bytes
from hetpeer.stages.tracing.capture import torch_line
from hetpeer.stages.tracing.refusals import unfit
from hetpeer.stages.tracing.trace import OpDag

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class EquivalenceGates:
    """Largest accepted differences between the blocks and the module."""

    loss: float
    """Difference of the loss, relative plus absolute: it may be a small difference of large numbers."""
    gradient: float
    """Difference of a parameter's gradient, relative to its 2-norm."""
    floor: float
    """The same relative to the whole model's gradient, for gradients that are zero but for rounding."""


EXACT = EquivalenceGates(loss=1e-4, gradient=1e-4, floor=1e-5)
ROUNDED = EquivalenceGates(loss=0.1, gradient=0.5, floor=0.05)
"""Gates of a bf16 run, whose blocks round at every border: only clear errors are found."""
SMALLEST = 1e-3
"""`Comparison.worst` measures a smaller gradient by this fraction of the whole gradient's norm."""
TINY = 1e-30
"""Difference that is allowed to a model whose gradient is zero: it fits its first microbatch already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Numbers of one microbatch by the eager module and by the blocks."""

    loss: float
    """Loss of the eager module."""
    found: float
    """Loss of the blocks."""
    norms: Mapping[str, float]
    """Parameter → 2-norm of the eager module's gradient."""
    differences: Mapping[str, float]
    """Parameter → 2-norm of the difference of the two gradients."""

    @property
    def whole(self) -> float:
        """2-norm of the eager module's gradient."""
        return math.hypot(*self.norms.values())

    def worst(self) -> tuple[float, float]:
        """Largest relative difference of the loss, and of a parameter's gradient."""
        floor = max(SMALLEST * self.whole, TINY)
        gradients = [self.differences[name] / max(norm, floor) for name, norm in self.norms.items()]
        return abs(self.found - self.loss) / max(abs(self.loss), TINY), max(gradients, default=0.0)


def memory_of(specs: Sequence[BlockSpec]) -> int:
    """Approximate bytes of a comparison, parameters aside: gradients, the largest block's twice, one pass."""
    gradients = [spec.parameter_bytes for spec in specs]
    return sum(gradients) + max(gradients) + sum(map(_kept, specs))


def least_memory_of(specs: Sequence[BlockSpec]) -> int:
    """Approximate bytes if gradients are compared as they come, and what the module keeps is elsewhere.

    These are both gradients of two blocks, the shared ones, and what one block keeps.
    """
    uses = Counter(name for spec in specs for name in spec.parameter_specs)
    counts = {name: tensor.nbytes for spec in specs for name, tensor in spec.parameter_specs.items()}
    shared = sum(counts[name] for name, count in uses.items() if count > 1)
    return 4 * max(spec.parameter_bytes for spec in specs) + shared + max(map(_kept, specs))


def _kept(spec: BlockSpec) -> int:
    """Bytes that autograd keeps of a block that does not recompute: the module does not."""
    return activation_bytes(replace(spec, recompute=False)) if spec.recompute else spec.activation_bytes


def compare(
    model: nn.Module,
    example: Mapping[str, Tensor],
    dag: OpDag,
    specs: Sequence[BlockSpec],
    keep: AbstractContextManager[Any] | None = None,
) -> Comparison:
    """Loss and gradients of the microbatch `example` by the module and by the blocks, as in the run.

    That is with the run's draws, and under autocast in a bf16 run. It takes a forward and a backward pass by
    the module, and two forwards and a backward by the blocks. Without `keep` it takes `memory_of(specs)`
    bytes. With it, gradients are compared and dropped as they come, which takes `least_memory_of(specs)`;
    the module's forward then runs in the context `keep`, which says where what its backward needs lies.

    The module is unchanged afterwards. Raises LocalError HP-MODEL-003 if the module cannot be trained on
    `example`, HP-MODEL-001 if the blocks cannot compute it.
    """
    autocast = specs[0].autocast
    blocks = BlockGradients(specs, dag.tensors, example)
    names: dict[Tensor, str] = {
        parameter: dag.state_dict.get(fqn, fqn) for fqn, parameter in model.named_parameters()
    }

    def take(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            with _refused(autocast):
                blocks.take(names[parameter], _dense(names[parameter], gradient))

    hooks = []
    model.zero_grad()
    try:
        with _tried(model):
            casts = torch.autocast(CPU.type, torch.bfloat16, enabled=autocast, cache_enabled=keep is None)
            with casts, keep or nullcontext():
                loss = model(**example)
            if keep is not None:
                hooks = [
                    parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
                    for parameter in names
                    if parameter.requires_grad
                ]
                with _refused(autocast):
                    blocks.await_of({names[one] for one in _reached(loss) if one in names})
            loss.backward()
        with _refused(autocast):
            if keep is None:
                blocks.await_of({names[one] for one in names if one.grad is not None})
            for parameter in names:
                take(parameter)
            blocks.finish()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad()
    found = Comparison(
        loss=loss.item(), found=blocks.loss, norms=blocks.norms, differences=blocks.differences
    )
    if not math.isfinite(found.loss) or not math.isfinite(found.whole):
        raise unfit(
            f"the first microbatch has the loss {found.loss} and a gradient of the norm {found.whole}",
            "what is not finite is no step",
            "find out where it comes from: torch.autograd.detect_anomaly() names the operator",
        )
    return found


def _reached(loss: Tensor) -> set[Tensor]:
    """The leaves to which the backward of `loss` comes."""
    found, seen, left = set(), set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        left += [after for after, _ in node.next_functions]
    return found


def _dense(name: str, gradient: Tensor) -> Tensor:
    """The gradient of a parameter. Raises LocalError HP-MODEL-003 for a sparse one."""
    if gradient.layout is not torch.strided:
        raise unfit(
            f"the gradient of parameter {name!r} is sparse",
            "volunteers add up dense ones",
            "leave sparse=True out",
        )
    return gradient


@contextmanager
def _refused(autocast: bool) -> Iterator[None]:
    """Context of the blocks' computing: its ProtocolError becomes HP-MODEL-001."""
    try:
        yield
    except ProtocolError as error:
        raise LocalError(
            "HP-MODEL-001",
            "volunteers cannot compute the model",
            why=f"{error.what}: {error.why}",
            fix="express that with other operators"
            + (", or let the run compute in float32" if autocast else ""),
            exit_code=ExitCode.CONFIG,
        ) from error


def check_likeness(
    model: nn.Module,
    example: Mapping[str, Tensor],
    dag: OpDag,
    specs: Sequence[BlockSpec],
    keep: AbstractContextManager[Any] | None = None,
) -> Comparison:
    """Refuse blocks whose loss or gradients are not the module's; returns the numbers of both.

    `keep` as in `compare`. Raises LocalError HP-MODEL-011, besides the errors of `compare`.
    """
    by_both = compare(model, example, dag, specs, keep)
    loss, found, norms, differences = by_both.loss, by_both.found, by_both.norms, by_both.differences
    gates = ROUNDED if specs[0].autocast else EXACT
    if not abs(found - loss) <= gates.loss * (abs(loss) + 1):
        raise _unlike(
            f"the blocks' loss of the first microbatch is {found:.6g}, and the model's own {loss:.6g}",
            "something in forward() decides that is no operator: Python's state, or a value that a trace "
            "took for a constant",
            "let forward() depend on its inputs, parameters and buffers alone",
        )
    excess = {
        name: differences[name] / max(gates.gradient * norm + gates.floor * by_both.whole, TINY)
        for name, norm in norms.items()
    }
    worst = max(excess, key=lambda name: math.inf if math.isnan(excess[name]) else excess[name])
    if not excess[worst] <= 1:
        raise _unlike(
            f"the blocks' gradient of {worst!r} is not the model's own: of {norms[worst]:.2g} it differs by "
            f"{differences[worst]:.2g}",
            "volunteers run operators, and derive them as torch does: a backward of your own "
            "(torch.autograd.Function) and hooks on gradients or tensors do not travel",
            "leave hooks out; where a value y stands for x in the backward pass write x + (y - x).detach(), "
            "and for a gradient times g, g * x + ((1 - g) * x).detach()",
        )
    return by_both


def _unlike(what: str, why: str, fix: str) -> LocalError:
    return LocalError("HP-MODEL-011", what, why=why, fix=fix, exit_code=ExitCode.CONFIG)


def loss_of(model: nn.Module, example: Mapping[str, Tensor], *, autocast: bool) -> float:
    """Loss of the eager module in training, with the run's draws; the module is unchanged afterwards.

    Raises LocalError HP-MODEL-003 if the module fails.
    """
    casts = torch.autocast(CPU.type, torch.bfloat16, enabled=autocast)
    with _tried(model), casts, torch.no_grad():
        return float(model(**example))


@contextmanager
def _tried(model: nn.Module) -> Iterator[None]:
    """Context of the author's module on the first microbatch: draws, buffers put back, errors."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    try:
        with DrawnDropout(ANY_DRAW):
            yield
    except LocalError:
        raise
    except Exception as error:  # the author's code may raise anything
        raise unfit(
            "the model fails on the first microbatch",
            f"{type(error).__name__}: {torch_line(error)}",
            "run the model on a microbatch of your data yourself",
        ) from error
    finally:
        with torch.no_grad():
            for buffer, content in before:
                buffer.copy_(content)
