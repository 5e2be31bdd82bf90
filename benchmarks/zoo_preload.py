"""Imports that every process of the zoo needs, done once in the server that forks them."""

import contextlib
import importlib

import torch
from torch import Tensor, nn

from hetpeer.stages.tracing.trace import trace


class _Least(nn.Linear):
    """A model whose trace makes torch import its own parts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean()


torch.set_num_threads(1)
for library in (
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "transformers.generation",
    "timm",
):
    with contextlib.suppress(Exception):  # what is missing or broken is not asked for
        importlib.import_module(library)
trace(_Least(2, 2), {"x": torch.zeros(2, 2)})
