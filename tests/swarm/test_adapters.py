"""Adapters on a frozen base in int8, in a swarm with a death on the way.

The first blocks have nothing to train: their vectors, states and sums are empty.
"""

import shutil
import signal

import pytest

from hetpeer.bootstrap.run.run_directory import RunDirectory
from tests.swarm.forkserver import ROOT
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
MODEL = """
from gpt import build as build_gpt

def build():
    return build_gpt(width=32, layers=4, heads=2, context=16)
"""
OPTIONS = {
    "steps": 8,
    "batch-size": 12,
    "microbatch-size": 2,
    "sequence-length": 16,
    "eval-every": 4,
    "eval-samples": 3,
    "checkpoint-every": 3,
    "seed": 3,
    "lora": "r=2,targets=h.2.attn.c_attn+h.3.mlp.c_fc+lm_head,dropout=0.1",
    "frozen-dtype": "int8",
}


async def test_adapters_are_trained_exactly(swarm: Swarm) -> None:
    pytest.importorskip("peft")
    folder = swarm.folder / "author"
    folder.mkdir()
    shutil.copy(ROOT / "hetpeer" / "examples" / "gpt.py", folder)
    (folder / "tiny.py").write_text(MODEL)
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(400)))
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    author = swarm.start(
        "author",
        "init",
        str(swarm.folder / "adapted"),
        f"--model={folder}/tiny.py:build",
        f"--data={folder}/text.txt",
        "--unchecked",
        *options,
    )
    assert await author.ended() == 0, author.said
    assert "adapted layers: 3; everything else is frozen" in author.said
    swarm.run = RunDirectory.open(swarm.folder / "adapted")
    vectors = [block.vector_count for block in swarm.run.manifest.blocks]
    assert vectors.count(0) >= 2, vectors
    assert vectors[0] == 0 < sum(vectors)

    bootstrap = await swarm.bootstrap()
    volunteers = [
        swarm.volunteer(name, before="killed_after_step_4" if name == "c" else "") for name in "cabd"
    ]
    assert await volunteers[0].ended(90.0) == -signal.SIGKILL
    await swarm.gone(volunteers[0])
    await swarm.finished(bootstrap, *volunteers[1:])
    swarm.exact()
