"""A model that is hard in every way that hetpeer knows, in a swarm of uneven clusters, with a death on the
way.
"""

import math
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.results.export import export
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.training_curve import curve_points
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
MODEL = '''
import numpy as np
import torch
from torch import nn


class Hard(nn.Module):
    """A tied table, BatchNorm, dropout, a frozen layer, a no_grad part, a skip over everything."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.inner = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(4))
        self.drop = nn.Dropout(0.1)
        self.inner[1].requires_grad_(False)
        self.head = nn.Linear(16, 40)
        self.head.weight = self.table.weight

    def forward(self, word):
        first = self.table(word).mean(1)
        x = first
        for inner, norm in zip(self.inner, self.norms):
            with torch.no_grad():
                gate = torch.sigmoid(x)
            x = x + self.drop(torch.tanh(norm(inner(x)))) * gate
        return self.head(x + first)


def build():
    return Hard()


def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch["next"])


def data():
    draw = np.random.default_rng(0)
    for _ in range(700):
        word = draw.integers(0, 40, 3)
        yield {"word": word, "next": np.int64(word.sum() % 40)}
'''
OPTIONS = {
    "steps": 8,
    # the last microbatch has three samples: with two, BatchNorm makes a gradient of 240 of activations of 1,
    # and what another processor
    # rounds differently is a part in ten thousand of it
    "batch-size": 23,
    "microbatch-size": 4,
    "eval-every": 4,
    "eval-samples": 7,
    "checkpoint-every": 4,
    "learning-rate": 1e-3,
    "group": "*.bias:weight_decay=0,learning_rate=2e-3",
    "seed": 5,
}


async def test_a_hard_model_is_trained_exactly(swarm: Swarm) -> None:
    module = swarm.folder / "hard.py"
    module.write_text(MODEL)
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    functions = [
        f"--{name}={module}:{f}" for name, f in (("model", "build"), ("loss", "loss"), ("data", "data"))
    ]
    author = swarm.start(
        "author", "init", str(swarm.folder / "hard"), *functions, *options, "--recompute", "--unchecked"
    )
    assert await author.ended() == 0, author.said
    swarm.run = RunDirectory.open(swarm.folder / "hard")
    count = len(swarm.run.manifest.blocks)
    assert count >= 3
    assert swarm.run.manifest.ties
    layouts = (((0, 1), (1, count)), ((0, count - 1), (count - 1, count)))
    swarm.run = resign(swarm.run, layouts=layouts)

    bootstrap = await swarm.bootstrap()
    volunteers = [
        swarm.volunteer(name, before="killed_after_step_4" if name == "c" else "") for name in "cabd"
    ]
    assert await volunteers[0].ended(90.0) == -signal.SIGKILL
    await swarm.gone(volunteers[0])
    await swarm.finished(bootstrap, *volunteers[1:])

    verdict, replayed = audit(swarm.run.path), replay(swarm.run.path)
    assert verdict.ok, verdict.problems
    assert replayed.ok, replayed.problems
    assert replayed.equal == replayed.steps == OPTIONS["steps"]
    for point in curve_points(swarm.run.manifest, swarm.records()):
        if point["kind"] == "step":
            norms = point["group_norms"]
            assert norms.keys() == {"*.bias", "others"}
            assert 0 < norms["*.bias"] < point["norm"]
            assert math.hypot(*norms.values()) == pytest.approx(point["norm"], rel=1e-5), (
                "tied ones count once"
            )
    _exports_into_the_authors_module(swarm.run.path, module)


def _exports_into_the_authors_module(run: Path, module: Path) -> None:
    exported = export(run, run.parent / "weights.safetensors")
    namespace: dict[str, object] = {}
    exec(module.read_text(), namespace)
    model = namespace["build"]()  # type: ignore[operator]
    model.load_state_dict(load_file(exported.weights))
    assert model.head.weight is model.table.weight
    assert model.norms[0].num_batches_tracked == OPTIONS["steps"] * 6
    assert torch.isfinite(model.eval()(torch.zeros(2, 3, dtype=torch.int64))).all()
