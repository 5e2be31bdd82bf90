"""Weights that the author's loss function returns beside the loss (docs/data.md, "Weights")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from hetpeer.bootstrap.authoring.loss_module import Loss, inputs_of
from hetpeer.bootstrap.model_checks.module_mode import mode_kept
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data.sample_weights import Weights
from hetpeer.stages.data.shards import Arrays
from hetpeer.stages.tracing.capture import torch_line


def given_weights(model: nn.Module, loss: Loss, example: Arrays) -> Callable[[Arrays], Weights] | None:
    """Function of arrays [samples, …] to the weights that `loss` returns for each sample alone; None if it
    returns the loss only.

    `model` is the author's, before `objective`. It is run on one sample of `example`; weights are then
    computed with outputs without values, so they cannot depend on these. Raises `LocalError` HP-MODEL-015 if
    they do.
    """
    first = _sample(example, 0)
    inputs = {name: first[name] for name in inputs_of(model, tuple(first))}
    try:
        outputs = _outputs(model, inputs)
        found = loss(outputs, first)
    except Exception:  # noqa: BLE001 - the author's code may raise anything; tracing names it
        return None
    if not isinstance(found, tuple):
        return None
    hollow = _without_values(outputs)

    def weights(rows: Arrays) -> Weights:
        numbers = []
        for row in range(len(next(iter(rows.values())))):
            try:
                _, weight = loss(hollow, _sample(rows, row))
            except Exception as error:
                raise _no_weight(torch_line(error)) from error
            numbers.append(_number(weight))
        return np.array(numbers, dtype=np.float32)

    weights({name: array[:1] for name, array in example.items()})
    return weights


def _sample(rows: Arrays, number: int) -> dict[str, Tensor]:
    """Sample `number` of `rows` as a batch of one."""
    return {name: torch.from_numpy(array[number : number + 1].copy()) for name, array in rows.items()}


def _outputs(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    """The model's outputs; its mode stays as it is."""
    with mode_kept(model, training=False), torch.no_grad():
        return model(**inputs)


def _without_values(outputs: Any) -> Any:
    """`outputs` with tensors that have shapes and types but no values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return tree_map(lambda part: mode.from_tensor(part) if isinstance(part, Tensor) else part, outputs)


def _number(weight: Any) -> float:
    """The weight as a number. Raises `LocalError` HP-MODEL-015 if it has no value, or is none."""
    if isinstance(weight, FakeTensor):
        raise _no_weight("it depends on the outputs of the model")
    try:
        number = float(weight)
    except Exception as error:
        raise _no_weight(torch_line(error)) from error
    if not 0 <= number < float("inf"):
        raise _no_weight(f"it is {number} for a sample")
    return number


def _no_weight(why: str) -> LocalError:
    return LocalError(
        "HP-MODEL-015",
        "the weight that the loss function returns cannot be used",
        why=why,
        fix="return (loss, weight); the weight is a number from 0 on that follows from the batch alone",
        exit_code=ExitCode.CONFIG,
    )
