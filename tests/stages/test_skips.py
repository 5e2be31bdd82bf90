"""Models whose values skip many layers are cut all the same: U-Nets, last states, encoders and decoders."""

import pytest
import torch
from torch import nn

from hetpeer.stages.tracing.cut import balanced_ranges, cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.stages.split_run import assert_same_step, eager_step, split_step

pytestmark = pytest.mark.xdist_group("models")


def double(before, after):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1)
    )


class UNet(nn.Module):
    """Three levels, each with a skip."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([double(1, 8), double(8, 16), double(16, 32)])
        self.lowest = double(32, 64)
        self.up = nn.ModuleList([double(96, 32), double(48, 16), double(24, 8)])
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        h, skips = x, []
        for level in self.down:
            h = level(h)
            skips.append(h)
            h = nn.functional.max_pool2d(h, 2)
        h = self.lowest(h)
        for level in self.up:
            h = nn.functional.interpolate(h, scale_factor=2, mode="nearest")
            h = level(torch.cat([h, skips.pop()], dim=1))
        return (self.last(h) - x).square().mean()


class States(nn.Module):
    """LSTMs one after the other; the last state of each is read at the end."""

    def __init__(self, several):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        sizes = [1] * 4 if several else [4]
        self.lstms = nn.ModuleList(nn.LSTM(16, 16, num_layers=size, batch_first=True) for size in sizes)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        h, last = self.table(tokens), torch.zeros(())
        for lstm in self.lstms:
            h, (state, _) = lstm(h)
            last = last + state.sum(0)
        return nn.functional.cross_entropy(self.head(last) + self.head(h.mean(1)), tokens[:, 0])


class Translator(nn.Module):
    """Each layer of the decoder reads the encoder's result."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        known = self.table(tokens)
        for layer in self.encoder:
            known = layer(known)
        h = self.table(tokens.flip(1))
        for layer in self.decoder:
            h = layer(h, known)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), tokens.flatten())


def tokens(samples):
    return {"tokens": torch.randint(0, 20, (samples, 12))}


def images(samples):
    return {"x": torch.randn(samples, 1, 16, 16)}


MODELS = {
    "U-Net": (UNet, images),
    "LSTMs": (lambda: States(several=True), tokens),
    "LSTM of four layers": (lambda: States(several=False), tokens),
    "translator": (Translator, tokens),
}


@pytest.mark.parametrize("name", MODELS)
def test_skips_do_not_keep_layers_together(name):
    torch.set_num_threads(1)
    torch.manual_seed(7)
    build, data = MODELS[name]
    model, batches = build(), [data(3), data(3), data(2)]
    dag = trace(model, batches[0])
    blocks = cut_blocks(dag)
    assert len(blocks) >= 4
    ranges = balanced_ranges(blocks, 4)
    costs = [sum(block.flops_forward for block in blocks[begin:end]) for begin, end in ranges]
    assert max(costs) < 0.5 * sum(costs)
    widest = max(sum(spec.nbytes for spec in block.at(3).outputs.values()) for block in blocks[:-1])
    tensors = [spec.nbytes for block in blocks[:-1] for spec in block.at(3).outputs.values()]
    assert widest <= 2.5 * max(tensors)
    assert_same_step(split_step(blocks, ranges, dag.tensors, batches), eager_step(model, batches), 1e-5)


@pytest.mark.parametrize(("kind", "both"), [(nn.LSTM, False), (nn.GRU, True)])
def test_layers_of_a_recurrent_stack_are_cut_apart_with_all_their_results(kind, both):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = kind(8, 8, num_layers=3, batch_first=True, bidirectional=both)

        def forward(self, x):
            out, state = self.stack(x)
            states = state if isinstance(state, tuple) else (state,)
            weights = torch.arange(states[0].shape[0]).view(-1, 1, 1) + 1
            return out.square().mean() + sum((one * weights).square().mean() for one in states)

    torch.manual_seed(8)
    model, data = Stack(), {"x": torch.randn(4, 5, 8)}
    dag = trace(model, data)
    blocks = cut_blocks(dag, 3)
    assert [len(block.parameter_specs) for block in blocks] == [8 if both else 4] * 3
    split = split_step(blocks, [(0, 1), (1, 2), (2, 3)], dag.tensors, [data])
    assert_same_step(split, eager_step(model, [data]))
