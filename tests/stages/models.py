"""Small models for the stage tests, each with one property that a careless tracer or cutter gets wrong."""

from functools import cache

import torch
from torch import Tensor, nn

from hetpeer.examples.gpt import GPT, build
from hetpeer.stages.tracing.trace import OpDag, trace

SIZES = {
    "default": {},
    "one layer": {"width": 32, "layers": 1, "heads": 2, "context": 16, "vocabulary": 50},
    "deep": {"width": 32, "layers": 5, "heads": 4, "context": 16, "vocabulary": 300},
    "large vocabulary": {"width": 32, "layers": 3, "heads": 2, "context": 16, "vocabulary": 4000},
}


@cache
def gpt(size: str) -> tuple[GPT, OpDag, dict[str, Tensor]]:
    """A GPT, its graph and one microbatch."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    settings = SIZES[size]
    model = build(**settings)
    shape = (3, settings.get("context", 64))
    tokens, targets = torch.randint(settings.get("vocabulary", 256), (2, *shape))
    data = {"tokens": tokens, "targets": targets}
    return model, trace(model, data), data


class Skip(nn.Module):
    """The input's projection is added again at the very end."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.layers[2].requires_grad_(not frozen)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.layers[0](x)
        h = torch.tanh(first)
        for layer in self.layers[1:]:
            h = torch.tanh(layer(h)) * self.scale
        return ((h + first - y) ** 2).mean()


class Regions(nn.Module):
    """A region with gradients inside one without, and values that cross all their edges."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x)
            with torch.enable_grad():
                g = torch.tanh(self.b(h))
            k = self.c(g) + h
        return ((self.d(g) * k + h - y) ** 2).mean()


class StopsGradient(nn.Module):
    """One factor is computed under no_grad: equal loss, other gradients when that is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            gate = torch.sigmoid(self.b(h)) * torch.tensor(3.0)
        return ((self.c(h * gate) + gate - y) ** 2).mean()


SMALL = {"skip": Skip, "frozen": lambda: Skip(frozen=True), "no_grad": StopsGradient, "regions": Regions}


@cache
def small(kind: str) -> tuple[nn.Module, OpDag, dict[str, Tensor]]:
    """One of the small models, its graph and one microbatch."""
    torch.set_num_threads(1)
    torch.manual_seed(2)
    model, data = SMALL[kind](), {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    return model, trace(model, data), data
