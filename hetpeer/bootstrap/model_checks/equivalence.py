"""Equivalence of the blocks and the author's module: one microbatch by both, before the manifest is signed.

A trace records operators only. It silently drops everything else that decides a gradient (a custom backward,
a hook) or a loss (Python state, a cast by autocast). So the author's machine compares the numbers themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hetpeer.bootstrap.model_checks.drawn_dropout import DrawnDropout
from hetpeer.dht.base.errors import ExitCode, LocalError, ProtocolError
from hetpeer.stages.block.block import Block, backpropagate
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.graph.graph_cost import ANY_DRAW
from hetpeer.stages.graph.safety_check import unpack_block
from hetpeer.stages.operators.own_operators import Pass
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
    return sum(gradients) + max(gradients) + sum(spec.activation_bytes for spec in specs)


def compare(
    model: nn.Module, example: Mapping[str, Tensor], dag: OpDag, specs: Sequence[BlockSpec]
) -> Comparison:
    """Loss and gradients of the microbatch `example` by the module and by the blocks, as in the run.

    That is with the run's draws, and under autocast in a bf16 run. It takes a forward and a backward pass by
    each of the two, and `memory_of(specs)` bytes; the module is unchanged afterwards. Raises LocalError
    HP-MODEL-003 if the module cannot be trained on `example`, HP-MODEL-001 if the blocks cannot compute it.
    """
    autocast = specs[0].autocast
    loss, gradients = _eager(model, example, dag, autocast)
    norms = {name: float(gradient.norm()) for name, gradient in gradients.items()}
    whole = math.hypot(*norms.values())
    if not math.isfinite(loss) or not math.isfinite(whole):
        raise unfit(
            f"the first microbatch has the loss {loss} and a gradient of the norm {whole}",
            "what is not finite is no step",
            "find out where it comes from: torch.autograd.detect_anomaly() names the operator",
        )
    try:
        found = _subtract_blocks(specs, dag.tensors, example, gradients)
    except ProtocolError as error:
        raise LocalError(
            "HP-MODEL-001",
            "volunteers cannot compute the model",
            why=f"{error.what}: {error.why}",
            fix="express that with other operators"
            + (", or let the run compute in float32" if autocast else ""),
            exit_code=ExitCode.CONFIG,
        ) from error
    differences = {name: float(gradient.norm()) for name, gradient in gradients.items()}
    return Comparison(loss=loss, found=found, norms=norms, differences=differences)


def check_likeness(
    model: nn.Module, example: Mapping[str, Tensor], dag: OpDag, specs: Sequence[BlockSpec]
) -> Comparison:
    """Refuse blocks whose loss or gradients are not the module's; returns the numbers of both.

    Raises LocalError HP-MODEL-011, besides the errors of `compare`.
    """
    by_both = compare(model, example, dag, specs)
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
    with _tried(model, autocast), torch.no_grad():
        return float(model(**example))


@contextmanager
def _tried(model: nn.Module, autocast: bool) -> Iterator[None]:
    """Context of the author's module on the first microbatch: draws, autocast, buffers put back, errors."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    try:
        with DrawnDropout(ANY_DRAW), torch.autocast(CPU.type, torch.bfloat16, enabled=autocast):
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


def _eager(
    model: nn.Module, example: Mapping[str, Tensor], dag: OpDag, autocast: bool
) -> tuple[float, dict[str, Tensor]]:
    """Loss of the author's module; graph name → gradient of parameters with one here or in the graph."""
    model.zero_grad()
    with _tried(model, autocast):
        loss = model(**example)
        with torch.autocast(CPU.type, enabled=False):
            loss.backward()
    gradients = {}
    for fqn, parameter in model.named_parameters():
        name, gradient = dag.state_dict.get(fqn, fqn), parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise unfit(
                f"the gradient of parameter {name!r} is sparse",
                "volunteers add up dense ones",
                "leave sparse=True out",
            )
        if gradient is not None:
            gradients[name] = gradient
        elif name in dag.parameters.values():
            gradients[name] = torch.zeros_like(parameter)
        parameter.grad = None
    return loss.item(), gradients


def _subtract_blocks(
    specs: Sequence[BlockSpec],
    tensors: Mapping[str, Tensor],
    data: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> float:
    """Subtract the blocks' gradients from `gradients`; returns the blocks' loss. Raises ProtocolError."""
    here, batch = Pass(ANY_DRAW), specs[0].batch
    passed, bundle = [], dict[str, Tensor]()
    for spec in specs:
        block, parameters = _received(spec, tensors)
        entering = {n: bundle[n].detach().requires_grad_(one.grad) for n, one in spec.inputs.items()}
        bundle = block.forward(entering, data, batch, here)
        passed.append((entering, parameters, bundle))
    (loss,) = bundle.values()
    seeds = {name: torch.ones_like(tensor) for name, tensor in bundle.items()}
    while passed:
        entering, parameters, leaving = passed.pop()
        inputs = [name for name, tensor in entering.items() if tensor.requires_grad]
        roots = [name for name, tensor in leaving.items() if tensor.requires_grad]
        if not roots:
            break
        found = backpropagate(
            [leaving[name] for name in roots],
            [*(entering[name] for name in inputs), *parameters.values()],
            [seeds[name] for name in roots],
        )
        # As the worker does: nothing came back for what only a region without gradients reads from here on.
        seeds = {
            name: torch.zeros_like(entering[name]) if gradient is None else gradient
            for name, gradient in zip(inputs, found, strict=False)
        }
        for name, gradient in zip(parameters, found[len(inputs) :], strict=True):
            if gradient is not None:
                gradients[name].sub_(gradient)
    return loss.item()


def _received(spec: BlockSpec, tensors: Mapping[str, Tensor]) -> tuple[Block, dict[str, Tensor]]:
    """The block as a volunteer gets it, on the author's tensors, and its parameters."""
    spec = unpack_block(pack_block(spec))
    parameters = {name: tensors[name].detach().requires_grad_() for name in spec.parameter_specs}
    return Block(spec, parameters, tensors, tensors, CPU), parameters
