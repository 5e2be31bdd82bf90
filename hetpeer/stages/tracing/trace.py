"""Conversion of the author's module to the operator graph; runs on the author's machine only.

capture.py has torch.export trace the module, rewrite.py converts the result to plain calls; here they become
a graph from the inputs to the loss. Anything that volunteers cannot run is refused now, by name and line, and
not in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import Batch, OperatorCall, TensorSpec, Value
from hetpeer.stages.graph.graph_cost import gradient_reach, measure
from hetpeer.stages.operators.names import BATCH_NORM
from hetpeer.stages.operators.own_operators import is_one_value
from hetpeer.stages.tracing.capture import capture
from hetpeer.stages.tracing.draws import read_numbers
from hetpeer.stages.tracing.passes.causal_masks import with_causal_flag
from hetpeer.stages.tracing.passes.complex_pairs import PAIRS
from hetpeer.stages.tracing.passes.gelu_formulas import with_gelu
from hetpeer.stages.tracing.passes.large_losses import without_logits
from hetpeer.stages.tracing.passes.recurrent_layers import split_layers
from hetpeer.stages.tracing.refusals import unfit, unsupported
from hetpeer.stages.tracing.rewrite import Rewriter, describe_tensor

COUNTER = "num_batches_tracked"
"""BatchNorm's buffer that counts forward passes; nothing reads it if the momentum is fixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDag:
    """The operator graph of a model from its inputs to its loss, and the tensors it starts from.

    It has only what the loss needs. A parameter that no gradient reaches is a buffer, since the optimizer
    must not touch it. FusionLLM (arXiv 2410.12707) calls such a graph an OP-DAG.

        dag = trace(model, {"tokens": tokens, "targets": targets})
        blocks = cut_blocks(dag, target_blocks=4)
    """

    nodes: tuple[OperatorCall, ...]
    """Calls in the order of the author's program."""
    values: Mapping[str, Value]
    """All values: inputs, parameters, buffers, results. `grad`: the loss sends a gradient there."""
    flops: Mapping[str, int]
    """Forward FLOPs of each node, for a full microbatch."""
    batch: int
    """Samples of a full microbatch."""
    dynamic: bool
    """Whether other numbers of samples can be computed."""
    inputs: tuple[str, ...]
    """The author's input names."""
    parameters: Mapping[str, str]
    """Value name → parameter name, in the order of the model's own list."""
    buffers: Mapping[str, str]
    statistics: Mapping[str, str]
    """Value name → name of a running mean or variance of BatchNorm."""
    tensors: Mapping[str, Tensor]
    """Parameter, buffer or statistic name → its present value, detached."""
    counters: Mapping[str, int]
    """BatchNorm's counters of forward passes and their present values."""
    state_dict: Mapping[str, str]
    """Every name of the author's state dict → the name used here; tied parameters have several."""
    rest: Mapping[str, Tensor]
    """Tensors of the state dict that the loss does not need, detached."""
    loss: str
    lines: Mapping[str, str]
    """Value → the line of the author's code, or of a library's, that made it; empty if none is known."""
    modules: Mapping[str, tuple[str, ...]]
    """Value → paths of the modules, outermost first, in whose only call it was made."""

    def at(self, name: str) -> Value:
        """A value's spec in numbers, for a full microbatch."""
        return value_at(self.values[name], self.batch)


def value_at(value: Value, batch: int) -> Value:
    """A value's spec for a microbatch of `batch` samples."""
    return value.at(batch) if isinstance(value, TensorSpec) else tuple(part.at(batch) for part in value)


def trace(model: nn.Module, example: Mapping[str, Tensor], *, autocast: bool = False) -> OpDag:
    """Trace `model(**example)`, one full microbatch, in training mode (which the model is put into).

    With `autocast` the author's casts to float32 are kept, for blocks that run under bf16 autocast. The first
    dimension of each tensor of `example` is the batch; other sizes are fixed in the graph. Tensors of a model
    on the meta device stay there, so that a model can be planned that does not fit into memory. Raises
    LocalError: HP-MODEL-001 an operator is not supported, HP-MODEL-002 torch cannot export the model,
    HP-MODEL-003 the model cannot be trained here.
    """
    model.train()
    batch = _batch(example)
    exported = capture(model, example, autocast)
    rewriter = Rewriter(numbers=read_numbers(exported.graph.nodes))
    for node in exported.graph.nodes:
        if node.op == "call_function":
            rewriter.add(node)
    loss = rewriter.name(_loss(exported))
    starts = dict(_starts(model, exported))
    layered = split_layers(rewriter.nodes, rewriter.values, rewriter.lines)
    nodes = _needed(with_causal_flag(layered, rewriter.values, _constants(starts)), loss)
    nodes = _needed(with_gelu(nodes, rewriter.values), loss)
    nodes = _needed(without_logits(nodes, rewriter.values, batch), loss)
    used = {name for node in nodes for name in node.references()}
    starts = {name: start for name, start in starts.items() if name in used}
    statistics, counters = _mutated(exported, rewriter, starts)

    given = {name: describe_tensor(tensor, grad=tensor.requires_grad) for name, (_, tensor) in starts.items()}
    given |= {
        node.name: describe_tensor(node.meta["val"])
        for node in exported.graph.find_nodes(op="placeholder")
        if node.name in used and node.name in example
    }
    dynamic = _is_dynamic({name: given[name] for name in example if name in used}, batch)
    values = {**given, **{node.name: rewriter.values[node.name] for node in nodes}}
    _check_batch_norms(nodes, values, batch, rewriter)
    measured = _measure(nodes, given, batch, rewriter)
    values = {name: _with_grad(value, measured[1][name]) for name, value in values.items()}
    _check_loss(values[loss])
    reached = gradient_reach(nodes, values, {loss})
    values = {name: value if name in reached else _with_grad(value, None) for name, value in values.items()}

    parameters = {n: starts[n][0] for n in starts if n in reached}
    for name, fqn in parameters.items():
        if given[name].dtype != "float32":
            raise unfit(
                f"parameter {fqn!r} is {given[name].dtype}",
                "holders agree on the bits of float32 parameters",
                "keep parameters in float32",
            )
    buffers = {n: starts[n][0] for n in starts if n not in reached and n not in statistics}
    tensors = {starts[n][0]: starts[n][1].detach() for n in (*parameters, *buffers, *statistics)}
    names = _state_dict(model)
    return OpDag(
        nodes=nodes,
        values=values,
        flops=measured[0],
        batch=batch,
        dynamic=dynamic,
        inputs=tuple(name for name in example if name in used),
        parameters=parameters,
        buffers=buffers,
        statistics=statistics,
        tensors=tensors,
        counters=counters,
        state_dict=names,
        rest={
            name: tensor.detach()
            for name, tensor in model.state_dict().items()
            if names[name] == name and name not in tensors and name not in counters
        },
        loss=loss,
        lines={node.name: rewriter.lines.get(node.name, "") for node in nodes},
        modules={node.name: rewriter.called_once(node.name) for node in nodes},
    )


def _batch(example: Mapping[str, Tensor]) -> int:
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in example.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise unfit(
            "the inputs of forward() differ in their first dimension",
            "it counts the samples of a microbatch",
            "make it the batch in all of them",
        )
    return int(sizes.pop())


def _state_dict(model: nn.Module) -> dict[str, str]:
    """Each name of the state dict → the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in model.state_dict(keep_vars=True).items()}


def _starts(model: nn.Module, exported: ExportedProgram) -> Iterator[tuple[str, tuple[str, Tensor]]]:
    """(value name, (name in the model, tensor)) of parameters, buffers and constants, in order.

    Complex ones are pairs of real numbers.
    """
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    names = _state_dict(model)
    tensors = {**exported.constants, **exported.state_dict}
    for spec in exported.graph_signature.input_specs:
        if spec.kind in kinds and spec.target is not None:
            name, tensor = names.get(spec.target, spec.target), tensors[spec.target]
            paired = (name + PAIRS, torch.view_as_real(tensor)) if tensor.is_complex() else (name, tensor)
            yield spec.arg.name, paired
        elif spec.kind is not InputKind.USER_INPUT:
            raise unfit(
                f"the model has an input of the kind {spec.kind.name}",
                "only tensors travel from peer to peer",
                "give forward() tensors only",
            )


def _constants(starts: Mapping[str, tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Value name → tensor of what training does not change by gradients and that has values."""
    return {
        name: tensor
        for name, (_, tensor) in starts.items()
        if not tensor.requires_grad and not tensor.is_meta
    }


def _mutated(
    exported: ExportedProgram, rewriter: Rewriter, starts: Mapping[str, tuple[str, Tensor]]
) -> tuple[dict[str, str], dict[str, int]]:
    """(value → name of BatchNorm statistics in the loss, counter → its value). Refuses other mutations."""
    statistics: dict[str, str] = {}
    counters: dict[str, int] = {}
    for spec in exported.graph_signature.output_specs:
        if spec.kind is OutputKind.BUFFER_MUTATION and spec.arg.name in rewriter.running:
            value = rewriter.running[spec.arg.name]
            if value in starts:
                statistics[value] = starts[value][0]
        elif spec.kind is OutputKind.BUFFER_MUTATION and str(spec.target).endswith(COUNTER):
            counters[str(spec.target)] = int(exported.state_dict[str(spec.target)])
        elif spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
            raise unfit(
                f"the model changes {spec.target!r} while it trains",
                "several peers compute at once, and each would change another copy",
                "keep all but BatchNorm's buffers constant",
            )
    return statistics, counters


def _loss(exported: ExportedProgram) -> str:
    outputs = exported.graph_signature.user_outputs
    if len(outputs) != 1 or not isinstance(outputs[0], str):
        raise unfit(
            f"forward() returns {len(outputs)} values",
            "a gradient is that of one loss",
            "return the loss alone, or name a --loss",
        )
    return outputs[0]


def _check_loss(value: Value) -> None:
    """Refuse a result that is not one float32 scalar, or does not depend on a parameter."""
    if not isinstance(value, TensorSpec) or value.shape != () or value.dtype != "float32":
        raise unfit(
            "forward() does not return a float32 scalar",
            "a gradient is that of one number",
            "return the mean loss of the microbatch",
        )
    if not value.grad:
        raise unfit(
            "the loss depends on no trainable parameter",
            "there would be no gradient",
            "check requires_grad and torch.no_grad",
        )


def _needed(nodes: Sequence[OperatorCall], loss: str) -> tuple[OperatorCall, ...]:
    """The nodes on which the loss depends."""
    wanted, needed = {loss}, []
    for node in reversed(nodes):
        if node.name in wanted:
            wanted.update(node.references())
            needed.append(node)
    return tuple(reversed(needed))


def _check_batch_norms(
    nodes: Sequence[OperatorCall], values: Mapping[str, Value], batch: int, rewriter: Rewriter
) -> None:
    """Refuse a BatchNorm that sees one value for each channel of a full microbatch."""
    for node in nodes:
        x = values[next(node.references())] if node.op == BATCH_NORM else None
        if isinstance(x, TensorSpec) and is_one_value(x.at(batch).sizes):
            where = rewriter.lines[node.name]
            raise unfit(
                f"a BatchNorm sees one value for each channel of a microbatch of {batch}",
                "one value has no variance" + (f", at {where}" if where else ""),
                "choose a larger --microbatch-size, or a norm of each sample (GroupNorm, LayerNorm)",
            )


def _measure(
    nodes: Sequence[OperatorCall], given: Mapping[str, TensorSpec], batch: int, rewriter: Rewriter
) -> tuple[Mapping[str, int], Mapping[str, Value]]:
    """(FLOPs of each node, spec of each value) for a full microbatch, from a run without memory."""
    fixed = {name: spec.at(batch) for name, spec in given.items()}
    try:
        measured = measure([node.at(batch) for node in nodes], fixed)
    except ProtocolError as error:  # the table allows the operator, but not these arguments
        op, *_, name = error.what.split()
        raise unsupported(op, error.why, rewriter.lines.get(name.strip("'"), "")) from error
    return measured.flops, {**fixed, **measured.values}


def _with_grad(value: Value, measured: Value | None) -> Value:
    """`value` with the gradient flags of `measured`; without any for None."""
    if isinstance(value, TensorSpec):
        return replace(value, grad=isinstance(measured, TensorSpec) and measured.grad)
    if not isinstance(measured, tuple):
        return tuple(replace(part, grad=False) for part in value)
    return tuple(replace(part, grad=other.grad) for part, other in zip(value, measured, strict=True))


def _is_dynamic(inputs: Mapping[str, TensorSpec], batch: int) -> bool:
    """Whether the batch stayed symbolic. Refuses inputs that have another first size than the batch."""
    for name, spec in inputs.items():
        if spec.shape[0] not in (Batch(1), batch):
            raise unfit(
                f"the graph takes {spec.shape[0]} for the first size of {name!r}",
                f"a microbatch has {batch} samples there",
                "let no size in forward() be a constant that is the batch's,"
                " or choose another --microbatch-size",
            )
    return any(spec.shape[0] == Batch(1) for spec in inputs.values())
