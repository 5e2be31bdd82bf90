"""`torch.inference_mode` in a model, traced as `torch.no_grad`.

torch.export 2.13 drops such a region without a trace, so what it computes would be trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Let regions of inference mode, decorated functions too, only switch gradients off.

    `inference_mode(False)` switches them on, as in torch.
    """
    region = torch.inference_mode
    torchs = region.__enter__, region.__exit__

    def enter(self: torch.inference_mode) -> None:
        self._grad_before = torch.is_grad_enabled()  # type: ignore[attr-defined]
        _set_grad(not self.mode)

    def leave(self: torch.inference_mode, *_: object) -> None:
        _set_grad(self._grad_before)  # type: ignore[attr-defined]

    region.__enter__, region.__exit__ = enter, leave  # type: ignore[method-assign]
    try:
        yield
    finally:
        region.__enter__, region.__exit__ = torchs  # type: ignore[method-assign]


def _set_grad(enabled: bool) -> None:
    """Switch gradients on or off; the trace holds a region only where that changes something."""
    if torch.is_grad_enabled() is not enabled:
        torch.set_grad_enabled(enabled)
