"""Handwritten digits of scikit-learn and a small classifier in plain torch; nothing here knows hetpeer.

Data, model and loss are three functions, so any of them can be exchanged:
`hetpeer init run --data digits.py:data --model digits.py:build --loss digits.py:loss`
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn


def data() -> Iterator[Mapping[str, np.ndarray]]:
    """1,797 samples: `image`, float32 [1, 8, 8] in 0…1, and `label`, a digit."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for image, label in zip(digits.images, digits.target, strict=True):
        yield {"image": (image[np.newaxis] / 16).astype(np.float32), "label": np.int64(label)}


class MLP(nn.Module):
    """Images [B, 1, 8, 8] in, logits [B, 10] out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        widths = [64, *[width] * layers]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = image.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.head(x)


def loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross entropy of a batch; `batch` has all of the samples' arrays."""
    return F.cross_entropy(logits, batch["label"])


def build(width: int = 128, layers: int = 3) -> MLP:
    """The model with fresh parameters; seed torch before for the same ones every time."""
    return MLP(width, layers)
