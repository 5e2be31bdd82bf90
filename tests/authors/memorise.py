"""Random samples with random labels. They can only be memorised, so rounding grows as in any training."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from tests.authors.tanh_net import TanhNet

WIDTH, LABELS, SAMPLES = 128, 8, 96


def build() -> nn.Module:
    return TanhNet(WIDTH, 6, LABELS)


def loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(outputs, batch["label"])


def data() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(SAMPLES):
        yield {
            "x": torch.randn(WIDTH, generator=generator),
            "label": torch.randint(LABELS, (), generator=generator),
        }
