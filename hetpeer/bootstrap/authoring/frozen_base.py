"""The frozen part of the author's model in fewer bytes: `--frozen-dtype bf16`, `int8` or `int4`.

The module itself gets the rounded numbers, so the check of the blocks against it stays as strict as ever. How
far the rounding moves the loss is measured apart from that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hetpeer.dht.base.errors import ExitCode, LocalError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hetpeer.stages.tracing.trace import OpDag

FLOAT32 = "float32"
TOLERANCE: Mapping[str, float] = {"bf16": 0.01, "int8": 0.02, "int4": 0.1}
"""Form → most that it may change the loss of the first microbatch, relative to that loss."""


def in_form(
    model: nn.Module,
    example: Mapping[str, Tensor],
    dag: OpDag,
    form: str,
    *,
    autocast: bool,
    tell: Callable[[str], None],
) -> OpDag:
    """`dag` with its frozen tensors stored in `form`; `model` gets the rounded numbers, too.

    `example`: the first microbatch. Raises `LocalError` HP-RUN-001 if nothing is frozen, HP-MODEL-011 if the
    loss changes by more than `TOLERANCE`.
    """
    import torch

    from hetpeer.bootstrap.model_checks.equivalence import loss_of
    from hetpeer.stages.tracing.stored_base import restored, stored

    frozen = {
        dag.state_dict.get(name, name): parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    small = stored(dag, frozen.keys(), form)
    rounded = {name: tensor for name, tensor in restored(small.tensors).items() if name not in small.tensors}
    if not rounded:
        raise LocalError(
            "HP-RUN-001",
            f"--frozen-dtype {form} has no effect",
            why="no frozen parameter of the model is float32 with two dimensions or more",
            fix="leave it out, freeze parameters (requires_grad_(False)), or train adapters with --lora",
            exit_code=ExitCode.CONFIG,
        )
    before = loss_of(model, example, autocast=autocast)
    with torch.no_grad():
        for name, tensor in rounded.items():
            frozen[name].copy_(tensor)
    after = loss_of(model, example, autocast=autocast)
    change = f"the loss of the first microbatch from {before:.6g} to {after:.6g}"
    tell(f"frozen tensors in {form} change {change}")
    if not abs(after - before) <= TOLERANCE[form] * abs(before):
        raise LocalError(
            "HP-MODEL-011",
            f"frozen tensors in {form} change {change}",
            why=f"more than {TOLERANCE[form]:.0%} is another model",
            fix="choose a --frozen-dtype with more bits",
            exit_code=ExitCode.CONFIG,
        )
    return small
