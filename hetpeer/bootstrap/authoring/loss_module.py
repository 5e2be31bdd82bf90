"""The author's model and loss as one module, which takes a batch by name and returns the loss.

The model becomes an instance of a subclass of its own class with another `forward`. So the names of its
parameters, its state dict and its modes stay the author's own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetpeer.bootstrap.samples.image_samples import PIXELS
from hetpeer.dht.base.errors import ExitCode, LocalError

Loss = Callable[[Any, Mapping[str, Tensor]], Tensor | tuple[Tensor, Tensor]]
"""(the model's outputs, all arrays of the batch) → the mean loss, a scalar, or (loss, its weight)."""
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def objective(model: nn.Module, loss: Loss | None, names: Sequence[str]) -> nn.Module:
    """Change `model` and return it: its forward takes the arrays `names` by keyword and returns the loss.

    The author's forward gets those arrays that it names. Without `loss` the loss is taken from the model's
    outputs: the output itself, its `.loss`, its `["loss"]`, or the first element of a tuple. Raises
    `LocalError` HP-MODEL-004 at once if the names do not fit; the returned module raises HP-MODEL-008 if its
    outputs contain no loss.
    """
    author = type(model)
    inputs = inputs_of(model, names)

    def forward(self: nn.Module, **batch: Tensor) -> Tensor:
        outputs = author.forward(self, **{name: batch[name] for name in inputs})
        if loss is None:
            return loss_in(outputs)
        found = loss(outputs, batch)
        return found[0] if isinstance(found, tuple) else found

    # torch.export calls a graph's inputs by the names in the signature.
    parameters = [inspect.Parameter("self", NAMED[0]), *(inspect.Parameter(name, NAMED[1]) for name in names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    model.__class__ = type(author.__name__, (author,), {"forward": forward, "__module__": author.__module__})
    return model


def with_scaled_pixels(model: nn.Module, scale: Sequence[float], offset: Sequence[float]) -> nn.Module:
    """Change `model` and return it: its forward takes `pixel_values` as uint8 and scales them.

    `scale` and `offset`: one number for each channel, the second dimension.
    """
    author = type(model)

    @functools.wraps(author.forward)
    def forward(self: nn.Module, *args: Any, **arrays: Any) -> Any:
        factor, added = (torch.tensor(numbers).reshape(-1, 1, 1) for numbers in (scale, offset))
        arrays[PIXELS] = arrays[PIXELS].float() * factor + added
        return author.forward(self, *args, **arrays)

    model.__class__ = type(author.__name__, (author,), {"forward": forward, "__module__": author.__module__})
    return model


def loss_in(outputs: Any) -> Tensor:
    """The loss among a model's outputs. Raises `LocalError` HP-MODEL-008."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("loss")
    elif isinstance(outputs, tuple | list):
        outputs = outputs[0] if outputs else None
    elif not isinstance(outputs, Tensor):
        outputs = getattr(outputs, "loss", None)
    if not isinstance(outputs, Tensor):
        raise LocalError(
            "HP-MODEL-008",
            "the model returns no loss",
            why="it is neither a tensor, nor has it one as .loss, ['loss'] or first of a tuple",
            fix="return the mean loss, or give a function of the outputs with --loss",
            exit_code=ExitCode.CONFIG,
        )
    return outputs


def inputs_of(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Arrays among `names` that the author's forward takes. Raises `LocalError` HP-MODEL-004."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [parameter for parameter in parameters if parameter.kind in NAMED]
    required = [parameter.name for parameter in named if parameter.default is inspect.Parameter.empty]
    inputs = [parameter.name for parameter in named if parameter.name in names]
    missing = [name for name in required if name not in names]
    if missing or not inputs:
        needs = f"needs {missing[0]!r}" if missing else "names none of a sample's arrays"
        raise LocalError(
            "HP-MODEL-004",
            f"the model's forward() {needs}",
            why=f"a sample has {', '.join(names)}",
            fix="give forward()'s parameters the names of the arrays, or a default",
            exit_code=ExitCode.CONFIG,
        )
    return inputs
