"""From the author's module to the operator graph; runs on the author's machine only.

torch.export gives the graph, decomposed into functional operators with parameters and buffers as named inputs. Two
things it would lose silently are kept here: `torch.no_grad` regions and frozen parameters. What volunteers cannot run
is refused now, by name, and not in the middle of a run.
"""

from __future__ import annotations

import operator
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from hetpeer.dht.errors import ExitCode, LocalError, ProtocolError
from hetpeer.stages.graph.cost import Value, measure
from hetpeer.stages.graph.ops import OPERATORS, check_call
from hetpeer.stages.graph.spec import ITEM_BYTES, Argument, Node, Ref, Symbol, TensorSpec

ASSERTIONS = frozenset(
    {
        "aten._assert_scalar.default",
        "aten._assert_tensor_metadata.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)
"""Checks that export leaves in the graph; they would pin the author's device on every peer."""

PLACEMENT = frozenset({"device", "pin_memory", "layout"})
"""Arguments about where a tensor lies: that is for the peer that runs the block to say."""

HINTS: Mapping[str, str] = {
    "dropout": "build the model with dropout 0: a task redone by another peer must give the same result",
    "rand": "take random numbers out of forward: a task redone by another peer must give the same result",
    "bernoulli": "take random numbers out of forward: a task redone by another peer must give the same result",
    "sym_": "let no shape depend on the values of a tensor (no x[mask], no item())",
    "item": "let no number of the graph depend on the values of a tensor",
    "batch_norm": "use LayerNorm or GroupNorm: running statistics depend on the order of microbatches",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDag:
    """The operator graph of a model from its inputs to its loss, and the tensors it starts from.

    Only what the loss needs is here. A parameter no gradient reaches is a buffer, as the optimizer must not touch it.
    """

    nodes: tuple[Node, ...]
    """In the order of the author's program."""
    values: Mapping[str, Value]
    """Every value: inputs, parameters, buffers, and what the nodes make. `grad`: the loss sends a gradient there."""
    flops: Mapping[str, int]
    """Forward FLOPs of each node."""
    inputs: tuple[str, ...]
    """The author's input names."""
    parameters: Mapping[str, str]
    """Value name -> parameter name, in the order of the model's own list."""
    buffers: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    """Parameter or buffer name -> its value now, detached."""
    loss: str


def trace(model: nn.Module, example: Mapping[str, Tensor]) -> OpDag:
    """Trace `model(**example)`, one microbatch, in training mode (the model is put into it).

    The shapes of `example` are fixed in the graph. Tensors of a model on the meta device stay there, so a model may be
    planned that does not fit into memory. Raises LocalError: HP-MODEL-001 an operator is not supported, HP-MODEL-002
    torch cannot export the model, HP-MODEL-003 the model is not one that can be trained here.
    """
    model.train()
    exported = _export(model, example)
    starts, mutated = _starts(exported), _mutated(exported)
    if mutated:
        raise _unfit(f"the model changes its buffer {mutated[0]!r} while it trains", HINTS["batch_norm"])
    nodes = _nodes(exported)
    _check_operators(nodes)
    loss = _loss(exported)
    nodes = _needed(nodes, loss)

    used = {name for node in nodes for name in node.references()}
    given = {
        name: _spec(tensor, tensor.requires_grad) for name, (_, tensor) in starts.items() if name in used
    }
    given |= {name: _spec(tensor, grad=False) for name, tensor in example.items() if name in used}
    try:
        measured = measure(nodes, given)
    except ProtocolError as error:  # the table allows the operator, but not what is asked of it
        raise _unsupported(error.what.split()[0], why=error.why) from error
    values = {**given, **measured.values}
    _check_loss(values[loss])
    reached = _reached(nodes, values, loss)
    values = {name: _with_grad(value, name in reached) for name, value in values.items()}

    parameters = {n: starts[n][0] for n in starts if n in reached}
    for name, fqn in parameters.items():
        if given[name].dtype != "float32":
            raise _unfit(f"parameter {fqn!r} is {given[name].dtype}", "keep parameters in float32")
    buffers = {n: starts[n][0] for n in starts if n in used and n not in reached}
    return OpDag(
        nodes=nodes,
        values=values,
        flops=measured.flops,
        inputs=tuple(name for name in example if name in used),
        parameters=parameters,
        buffers=buffers,
        tensors={starts[name][0]: starts[name][1].detach() for name in (*parameters, *buffers)},
        loss=loss,
    )


def _export(model: nn.Module, example: Mapping[str, Tensor]) -> ExportedProgram:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, of what torch does in there
            exported = torch.export.export(model, (), dict(example), strict=False)
            _keep_no_grad(exported)
            decomposed: ExportedProgram = exported.run_decompositions({})
    except LocalError:
        raise
    except Exception as error:  # the author's code runs here, and torch has many ways to say no
        raise LocalError(
            "HP-MODEL-002",
            "torch.export cannot trace the model",
            why=_torch_line(error),
            fix="make forward() free of decisions that depend on tensor values; try torch.export.export(model, ...)",
            exit_code=ExitCode.CONFIG,
        ) from error
    return decomposed


def _torch_line(error: Exception) -> str:
    """The first line of torch's message and the author's line that caused it."""
    message = (str(error).strip().splitlines() or [type(error).__name__])[0]
    torch_home = Path(torch.__file__).parent
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if torch_home not in Path(f.filename).parents
    ]
    own = [f for f in frames if f.filename != __file__]
    return f"{message} ({own[-1].filename}:{own[-1].lineno}: {own[-1].line})" if own else message


def _keep_no_grad(exported: ExportedProgram) -> None:
    """Detach what leaves a `torch.no_grad` region, as decomposition dissolves the region itself.

    Export wraps such a region in a higher-order operator. Its results are all a gradient could come back through, so
    a detach behind each of them means the same as the region did.
    """
    graph = exported.graph_module.graph
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if isinstance(node.target, torch._ops.HigherOrderOperator):  # noqa: SLF001 (it has no public name)
                _check_region(node, nested=module is not exported.graph_module)
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.wrap_with_set_grad_enabled
    ):
        for result in list(node.users):
            with graph.inserting_after(result):
                detached = graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta = dict(result.meta)
            result.replace_all_uses_with(detached, delete_user_cb=lambda user, new=detached: user is not new)
            for output in exported.graph_signature.output_specs:
                if output.arg.name == result.name:
                    output.arg.name = detached.name
    exported.graph_module.recompile()


def _check_region(node: torch.fx.Node, nested: bool) -> None:
    """Only a plain no_grad region is understood: not enable_grad, autocast or one region inside another."""
    plain = node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False
    if nested or not plain or any(user.target is not operator.getitem for user in node.users):
        raise _unsupported(str(node.target))


def _starts(exported: ExportedProgram) -> dict[str, tuple[str, Tensor]]:
    """Value name -> (name in the model, tensor) of all parameters, buffers and constants, in the model's order."""
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    tensors = {**exported.constants, **exported.state_dict}
    starts = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind in kinds and spec.target is not None:
            starts[spec.arg.name] = (spec.target, tensors[spec.target])
        elif spec.kind is not InputKind.USER_INPUT:
            raise _unfit(
                f"the model has an input of the kind {spec.kind.name}", "give forward() tensors only"
            )
    return starts


def _mutated(exported: ExportedProgram) -> list[str]:
    kinds = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    return [str(spec.target) for spec in exported.graph_signature.output_specs if spec.kind in kinds]


def _loss(exported: ExportedProgram) -> str:
    outputs = exported.graph_signature.user_outputs
    if len(outputs) != 1 or not isinstance(outputs[0], str):
        raise _unfit(f"forward() returns {len(outputs)} values", "return the loss alone")
    return outputs[0]


def _check_loss(value: Value) -> None:
    if not isinstance(value, TensorSpec) or value.shape != () or value.dtype != "float32":
        raise _unfit("forward() does not return a float32 scalar", "return the mean loss of the microbatch")
    if not value.grad:
        raise _unfit("the loss depends on no trainable parameter", "check requires_grad and torch.no_grad")


def _nodes(exported: ExportedProgram) -> tuple[Node, ...]:
    nodes = []
    for node in exported.graph.nodes:
        if node.op != "call_function" or str(node.target) in ASSERTIONS:
            continue
        op = "getitem" if node.target is operator.getitem else str(node.target)
        args = tuple(_argument(op, argument) for argument in node.args)
        named = {key: _argument(op, value) for key, value in node.kwargs.items() if key not in PLACEMENT}
        kwargs = {key: argument for key, argument in named.items() if argument is not None}
        nodes.append(Node(name=node.name, op=op, args=args, kwargs=kwargs))
    return tuple(nodes)


def _argument(op: str, argument: Any) -> Argument:
    if argument is None or type(argument) in (bool, int, float):
        return argument  # type: ignore[no-any-return]
    if isinstance(argument, torch.fx.Node):
        return Ref(argument.name)
    if isinstance(argument, (list, tuple)):
        return tuple(_argument(op, item) for item in argument)
    if isinstance(argument, torch.device):
        return Symbol("device", "")
    if isinstance(argument, str):
        return Symbol("text", argument)
    for kind, family in (
        ("dtype", torch.dtype),
        ("memory_format", torch.memory_format),
    ):
        if isinstance(argument, family):
            return Symbol(kind, str(argument).removeprefix("torch."))
    raise _unsupported(op)


def _check_operators(nodes: Sequence[Node]) -> None:
    for node in nodes:
        if node.op not in OPERATORS:
            raise _unsupported(node.op)
        try:
            check_call(node)
        except ProtocolError as error:
            raise _unsupported(node.op, why=error.what) from error


def _needed(nodes: Sequence[Node], loss: str) -> tuple[Node, ...]:
    """The nodes the loss depends on."""
    wanted, needed = {loss}, []
    for node in reversed(nodes):
        if node.name in wanted:
            wanted.update(node.references())
            needed.append(node)
    return tuple(reversed(needed))


def _reached(nodes: Sequence[Node], values: Mapping[str, Value], loss: str) -> set[str]:
    """Values to which the loss sends a gradient: backwards along everything that requires one."""
    reached = {loss}
    for node in reversed(nodes):
        if node.name in reached:
            reached.update(name for name in node.references() if _requires_grad(values[name]))
    return reached


def _requires_grad(value: Value) -> bool:
    return value.grad if isinstance(value, TensorSpec) else any(part.grad for part in value)


def _with_grad(value: Value, grad: bool) -> Value:
    if isinstance(value, TensorSpec):
        return TensorSpec(shape=value.shape, dtype=value.dtype, grad=value.grad and grad)
    return tuple(TensorSpec(shape=part.shape, dtype=part.dtype, grad=part.grad and grad) for part in value)


def _spec(tensor: Tensor, grad: bool) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise _unfit(
            f"the model or its input holds a tensor of {dtype}", f"use one of {', '.join(ITEM_BYTES)}"
        )
    return TensorSpec(shape=tuple(tensor.shape), dtype=dtype, grad=grad)


def _unsupported(op: str, why: str = "") -> LocalError:
    fix = next((hint for part, hint in HINTS.items() if part in op), "express the model with other operators")
    what = f"the model uses the operator {op}, which volunteers cannot run"
    return LocalError("HP-MODEL-001", what, why=why, fix=fix, exit_code=ExitCode.CONFIG)


def _unfit(what: str, fix: str) -> LocalError:
    return LocalError("HP-MODEL-003", what, fix=fix, exit_code=ExitCode.CONFIG)
