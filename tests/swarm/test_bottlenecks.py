"""Bottlenecks in a swarm with a death on the way: few bytes cross, and the run is that of one machine."""

import shutil
import signal
from pathlib import Path

import pytest

from hetpeer.bootstrap.log.evidence import Evidence
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.peer.watching.metric_families import PREFIX
from tests.amounts import mostly_proof
from tests.swarm.conftest import MODEL
from tests.swarm.forkserver import ROOT
from tests.swarm.swarm import Swarm, scraped

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
WIDTH, RANK, LENGTH, SAMPLES = 32, 2, 16, 2
OPTIONS = {
    "steps": 100_000,
    "batch-size": 12,
    "microbatch-size": SAMPLES,
    "sequence-length": LENGTH,
    "eval-every": 8,
    "eval-samples": 3,
    "checkpoint-every": 10,
    "seed": 3,
    "stages": 2,
    "bottleneck": RANK,
}
EXAMPLES = ROOT / "hetpeer" / "examples"
IMAGES = {"batch-size": 24, "microbatch-size": 4, "learning-rate": 0.005, "bottleneck": 4, "codec": "int4"}
PATCHES = """
import torch
from torch import nn
from torch.nn import functional as F

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mixed, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x):
        x = x + F.scaled_dot_product_attention(*self.mixed(self.norm(x)).chunk(3, -1))
        return x + self.mlp(x)

class VisionTransformer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(17, width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))
        self.head = nn.Linear(width, 10)

    def forward(self, image, label=None):
        patches = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(image.shape[0], -1, -1), patches], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x[:, 0])
        return logits if label is None else F.cross_entropy(logits, label)

def build():
    return VisionTransformer()
"""


async def made(swarm: Swarm, model: Path, data: str, *options: str, **values: object) -> str:
    """Make a run by `hetpeer init`, that of `swarm` from now on; returns what was said."""
    author = swarm.start(
        "author",
        "init",
        str(swarm.folder / "narrow"),
        f"--model={model}:build",
        f"--data={data}",
        "--unchecked",
        *options,
        *(f"--{name}={value}" for name, value in (OPTIONS | values).items()),
    )
    assert await author.ended() == 0, author.said
    assert "bottlenecks change the loss of the first microbatch from" in author.said
    swarm.run = RunDirectory.open(swarm.folder / "narrow")
    return author.said


async def test_a_sixteenth_crosses_and_the_replay_is_equal(swarm: Swarm) -> None:
    """Two pipelines; a volunteer dies with an update in its memory."""
    folder = swarm.folder / "author"
    folder.mkdir()
    shutil.copy(EXAMPLES / "gpt.py", folder)
    (folder / "tiny.py").write_text(MODEL)
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(400)))
    said = await made(swarm, folder / "tiny.py", f"{folder}/text.txt")
    assert "bottlenecks behind h.1: 2 features cross, not 32" in said

    bootstrap = await swarm.bootstrap()
    volunteers = [
        swarm.volunteer(name, "--dashboard", "0", before="killed_after_step_4" if name == "c" else "polite")
        for name in "cabd"
    ]
    assert await volunteers[0].ended(90.0) == -signal.SIGKILL
    await swarm.gone(volunteers[0])
    await swarm.committed(swarm.version + 10)
    figures = [await scraped(volunteer) for volunteer in volunteers[1:]]
    step = swarm.version + 3
    await swarm.stored(step)
    for child in (*volunteers[1:], bootstrap):
        child.signal(signal.SIGINT)
        await child.ended()
    swarm.exact_so_far()

    # what crosses is RANK numbers for each token, both ways for each sample; evaluations go one way
    sample = 4 * LENGTH * RANK
    sent = [int(found[f"{PREFIX}bundle_transmit_bytes_total",]) for found in figures]
    assert all(nbytes % sample == 0 for nbytes in sent), sent
    one_way = step * int(OPTIONS["batch-size"]) * sample
    assert one_way / 4 < sum(sent) < 3 * one_way, (sent, one_way)
    assert 3 * one_way < one_way * WIDTH / RANK


@pytest.mark.parametrize(
    ("model", "width", "start"),
    mostly_proof([("resnet", 16, (16, 1, 1)), ("patches", 32, (17, 32))], [("resnet", 16, (16, 1, 1))]),
)
async def test_images_over_lines_that_round(
    swarm: Swarm, model: str, width: int, start: tuple[int, ...]
) -> None:
    """As an author of images would do it: every bit of the run again, although its links rounded to half
    bytes and a volunteer was killed.
    """
    path = EXAMPLES / "resnet.py"
    if model == "patches":
        path = swarm.folder / "patches.py"
        path.write_text(PATCHES)
    said = await made(swarm, path, f"{EXAMPLES}/digits.py:data", "--uniform", **IMAGES, steps=20)
    assert f": 4 features cross, not {width}" in said
    bottlenecks = swarm.run.author().bottlenecks
    assert bottlenecks is not None
    assert [place.start for place in bottlenecks.places] == [start]

    bootstrap = await swarm.bootstrap()
    killed, *others = [
        swarm.volunteer(name, before="killed_after_step_4" if name == "c" else "") for name in "cabd"
    ]
    assert await killed.ended(90.0) == -signal.SIGKILL, swarm.voices()
    await swarm.gone(killed)
    await swarm.finished(bootstrap, *others)
    swarm.exact()
    losses = [commit["loss"] for _, commit in sorted(History.of(swarm.records()).commits.items())]
    assert losses[-1] < 0.8 * losses[0]

    lives = Evidence.read(swarm.run.volunteers, swarm.run.run_id).lives
    lines = [line for events in lives.values() for line in events]
    narrow = swarm.run.manifest.layouts[0][0][1]
    for block, bundles in ((narrow - 1, "returned"), (narrow, "entered")):
        coded = [one for line in lines if line.block == block for one in getattr(line, bundles)]
        assert {codec for codec, *_ in coded} == {"int4"}
        assert not any(kept for _, kept, _ in coded)
