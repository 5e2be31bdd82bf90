"""Families of timm for `make zoo`: one small variant of each, which classifies images in training."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from benchmarks.zoo_timm_table import SETTINGS, SIZES
from hetpeer.bootstrap.authoring.user_code import with_loss

SAMPLES, CLASSES = 4, 10
SIZE = 64
"""Edge of an image in pixels."""
RATE = 0.1
"""Probability of dropout and of drop path, where a family has them."""


class Classifier(nn.Module):
    """A model of timm with its usual loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(image), label)


def make(name: str, _task: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model as a function of its arrays that returns the loss, and a microbatch."""
    size = SIZES.get(name, SIZE)
    torch.manual_seed(0)
    model = Classifier(_created(name, size))
    microbatch = {
        "image": torch.randn(SAMPLES, 3, size, size),
        "label": torch.randint(0, CLASSES, (SAMPLES,)),
    }
    return with_loss(model, None, microbatch), microbatch


def _created(name: str, size: int) -> nn.Module:
    """The model, with as many of the usual settings as its family takes."""
    import timm

    usual = {"img_size": size, "drop_path_rate": RATE, "drop_rate": RATE}
    for count in range(len(usual), -1, -1):
        for chosen in itertools.combinations(usual, count):
            settings = {key: usual[key] for key in chosen} | SETTINGS.get(name, {})
            try:
                return timm.create_model(name, num_classes=CLASSES, **settings)  # type: ignore[no-any-return]
            except TypeError as error:
                refused = error
    raise refused
