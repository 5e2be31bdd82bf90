"""`Module.to` with the dtype that a module has: it changes nothing, and torch.export cannot trace it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def needless_casts_pass() -> Iterator[None]:
    """Let `module.to(dtype)` return the module if its numbers have that dtype."""
    torch_to = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        numbers = [one for one in (*self.parameters(), *self.buffers()) if one.is_floating_point()]
        if not kwargs and len(args) == 1 and all(one.dtype is args[0] for one in numbers):
            return self
        return torch_to(self, *args, **kwargs)

    nn.Module.to = to  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.to = torch_to  # type: ignore[method-assign]
