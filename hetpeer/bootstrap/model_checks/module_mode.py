"""Training or evaluation mode of the author's module, for as long as it is tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def mode_kept(model: nn.Module, *, training: bool) -> Iterator[None]:
    """While active, all of the model is in one mode; afterwards each module is in its mode of before."""
    was = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in was:
            module.training = mode
