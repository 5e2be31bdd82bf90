"""Gradient checkpointing of the author's module while it is traced: `torch.utils.checkpoint`, called plainly.

A checkpoint changes no number, only when a forward pass is computed, and blocks have a setting of their own
for that (`recompute`). Its reentrant form hides the gradient from a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint as torch_checkpoint


class Checkpoints:
    """Stand-in for torch's two forms of a checkpoint."""

    def __init__(self) -> None:
        self.used = False
        """Whether a part of the module was called by a checkpoint."""

    def apply(self, function: Callable[..., Any], _preserve: bool, *arguments: Any) -> Any:
        """The reentrant form: an autograd function."""
        self.used = True
        return function(*arguments)

    def around(self, *_arguments: Any, **_options: Any) -> Iterator[None]:
        """The other form: a generator that runs up to its yield before the call, and to its end after it."""
        self.used = True
        yield


@contextmanager
def plain_checkpoints() -> Iterator[Checkpoints]:
    """Context in which checkpoints call their function and do nothing else."""
    found = Checkpoints()
    module: Any = torch_checkpoint
    before = module.CheckpointFunction, module._checkpoint_without_reentrant_generator  # noqa: SLF001 (its name)
    module.CheckpointFunction, module._checkpoint_without_reentrant_generator = found, found.around  # noqa: SLF001
    try:
        yield found
    finally:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = before  # noqa: SLF001
