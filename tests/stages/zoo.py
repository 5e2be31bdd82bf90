"""The models that hetpeer promises to train, small: each with what its kind is hard for."""

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor, nn

from hetpeer.examples import gpt, resnet
from hetpeer.stages.tracing.trace import OpDag, trace
from tests.stages.models import SMALL

CONTEXT = 16
Data = Mapping[str, Tensor]


def text(samples: int) -> Data:
    tokens = torch.randint(0, 256, (samples, CONTEXT + 1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def images(samples: int) -> Data:
    return {"image": torch.randn(samples, 1, 8, 8), "label": torch.randint(0, 10, (samples,))}


def vectors(samples: int) -> Data:
    return {"x": torch.randn(samples, 8), "y": torch.randn(samples, 8)}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(part for _ in range(6) for part in (nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)))
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.layers(x) - y) ** 2).mean()


class Recurrent(nn.Module):
    """One operator for a whole LSTM, and a convolution over time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.relu(self.conv(self.table(tokens).transpose(1, 2))).transpose(1, 2)
        logits = self.head(self.lstm(x)[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Encoder(nn.Module):
    """torch's own transformer layers, with dropout on attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.layers(self.table(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt2() -> nn.Module:
    from hetpeer.examples import transformers_models

    return transformers_models.gpt2(layers=3, width=32)


def llama() -> nn.Module:
    from hetpeer.examples import transformers_models

    return transformers_models.llama(layers=3, width=32)


ZOO: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Data]]] = {
    "mlp": (MLP, vectors),
    "resnet": (resnet.build, images),
    "gpt": (lambda: gpt.GPT(32, 3, 2, CONTEXT, 256), text),
    "gpt tied, dropout": (lambda: gpt.GPT(32, 3, 2, CONTEXT, 256, dropout=0.1, tied=True), text),
    "transformers gpt2": (gpt2, text),
    "transformers llama": (llama, text),
    "encoder": (Encoder, text),
    "recurrent": (Recurrent, text),
    **{name: (model, vectors) for name, model in SMALL.items()},
}

HERE = ZOO.keys() - {"transformers gpt2", "encoder", "recurrent"}
"""The models that `make test` tries; each of the others takes seconds to trace, and is a proof."""


@cache
def zoo(name: str) -> tuple[nn.Module, OpDag, list[Data]]:
    """A model, its graph for four samples, and microbatches of 4, 4 and 3 samples."""
    torch.set_num_threads(1)
    torch.manual_seed(4)
    build, data = ZOO[name]
    model = build()
    microbatches = [data(samples) for samples in (4, 4, 3)]
    return model, trace(model, microbatches[0]), microbatches
