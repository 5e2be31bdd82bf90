"""A net that fits its samples from the first step on: its gradients are rounding noise and nothing else."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from tests.authors.tanh_net import TanhNet

WIDTH, SAMPLES = 32, 48


def build() -> nn.Module:
    model = TanhNet(WIDTH, 4, 4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
    return model


def loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(outputs, batch["y"])


def data() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    with torch.no_grad():
        outputs = build().double()(inputs.double()).float()
    for x, y in zip(inputs, outputs, strict=True):
        yield {"x": x, "y": y}
