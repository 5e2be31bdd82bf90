"""torch.export of the author's module to a functional graph that keeps what export would lose silently.

Runs on the author's machine only. The first dimension of every input is the batch, and stays symbolic if the
model allows it. Regions of `torch.no_grad` and `torch.inference_mode` are kept as detached results.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.tracing.draws import number_draws
from hetpeer.stages.tracing.graph_size import bounded_graphs
from hetpeer.stages.tracing.passes.complex_pairs import without_complex
from hetpeer.stages.tracing.refusals import author_frame, unsupported
from hetpeer.stages.tracing.stand_ins.ctc_losses import ctc_as_operator
from hetpeer.stages.tracing.stand_ins.expert_loops import loops_as_groups
from hetpeer.stages.tracing.stand_ins.inference_mode import inference_as_no_grad
from hetpeer.stages.tracing.stand_ins.module_casts import needless_casts_pass
from hetpeer.stages.tracing.stand_ins.sanity_checks import checks_pass
from hetpeer.stages.tracing.stand_ins.time_loops import loops_as_scans

_log = logging.getLogger(__name__)

MAX_BATCH = 1 << 20
CASTS: Mapping[Any, int] = {torch.ops.aten.to.dtype: 1, torch.ops.aten.to.device: 2}
"""Position of the target dtype in casts, but for `x.cpu()`, whose dtype is not the author's wish."""


def capture(model: nn.Module, example: Mapping[str, Tensor], autocast: bool) -> ExportedProgram:
    """The decomposed graph of `model(**example)` in the model's own mode; `autocast`: for a run under bf16
    autocast.

    Every tensor of `example` has the batch as its first dimension. Raises LocalError HP-MODEL-001 (a region
    that is not supported), HP-MODEL-002 (torch cannot export the model, with the author's line) or
    HP-MODEL-016 (the graph is too large).
    """
    batch, several = Dim("batch", min=1, max=MAX_BATCH), example
    if next(iter(example.values())).shape[0] == 1:  # export would take a batch of one for a constant
        several = {name: torch.cat([tensor, tensor]) for name, tensor in example.items()}
    try:
        return _export(model, several, {name: {0: batch} for name in example}, autocast)
    except LocalError:
        raise
    except Exception:  # noqa: BLE001 - torch has many ways to say that a size must be fixed, or that it cannot at all
        return _export_fixed(model, example, autocast)


def _export_fixed(model: nn.Module, example: Mapping[str, Tensor], autocast: bool) -> ExportedProgram:
    """Export with all sizes fixed; an error now is the model's."""
    try:
        return _export(model, example, None, autocast)
    except LocalError:
        raise
    except Exception as error:
        raise LocalError(
            "HP-MODEL-002",
            "torch.export cannot trace the model",
            why=torch_line(error),
            fix="make forward() free of decisions that depend on tensor values;"
            " try torch.export.export(model, ...)",
            exit_code=ExitCode.CONFIG,
        ) from error


def _export(model: nn.Module, example: Mapping[str, Tensor], dynamic: Any, autocast: bool) -> ExportedProgram:
    """Export and decompose `model`."""
    with _quiet_torch(), bounded_graphs():
        with _stand_ins():
            exported = torch.export.export(model, (), dict(example), strict=False, dynamic_shapes=dynamic)
        number_draws(exported)
        _keep_no_grad(exported)
        if autocast:
            _keep_casts(exported)
        decomposed: ExportedProgram = exported.run_decompositions({})
        without_complex(decomposed)
    return decomposed


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Context in which all functions that a trace cannot hold have their stand-ins."""
    with contextlib.ExitStack() as stack:
        for replaced in (
            checks_pass,
            ctc_as_operator,
            inference_as_no_grad,
            loops_as_groups,
            loops_as_scans,
            needless_casts_pass,
        ):
            stack.enter_context(replaced())
        yield


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keep torch's warnings and graph dumps off the terminal; -vv shows them.

    Our own error says what is wrong with a trace.
    """
    reporter, said = logging.getLogger("torch.fx.experimental.symbolic_shapes"), io.StringIO()
    before = reporter.level
    reporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        reporter.setLevel(before)
        if said.getvalue().strip():
            _log.debug("torch says: %s", said.getvalue())


def _keep_casts(exported: ExportedProgram) -> None:
    """Keep casts to float32 of values that are float32 in the trace: under autocast they may be bfloat16.

    Decomposition removes such a cast, and with it an author's `x.float()` before a norm or a long sum.
    """
    for graph in _graphs(exported):
        for node in graph.nodes:
            position = CASTS.get(node.target)
            if (
                position is not None
                and node.args[position] is torch.float32 is node.args[0].meta["val"].dtype
            ):
                node.target, node.args = torch.ops.aten._to_copy.default, node.args[:1]  # noqa: SLF001 (its name)
                node.kwargs = {"dtype": torch.float32}


def _graphs(exported: ExportedProgram) -> list[torch.fx.Graph]:
    """The program's own graph, and those of its regions."""
    return [m.graph for m in exported.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]


def torch_line(error: Exception) -> str:
    """The first line of torch's message and the author's line that caused it."""
    message = (str(error).strip().splitlines() or [type(error).__name__])[0]
    own = author_frame(error)
    return f"{message} ({own.filename}:{own.lineno}: {own.line})" if own else message


def _keep_no_grad(exported: ExportedProgram) -> None:
    """Detach what leaves a `torch.no_grad` region, since decomposition dissolves the region.

    Export wraps such a region in a higher-order operator. A gradient could come back only through its
    results, so detaching each of them means the same.
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
    """Refuse regions other than plain no_grad: enable_grad, autocast, or nested ones."""
    plain = node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False
    if nested or not plain or any(user.target is not operator.getitem for user in node.users):
        raise unsupported(str(node.target))
