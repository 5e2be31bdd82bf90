"""A run that cannot go on is halted, and everybody is told why."""

import shutil

import pytest

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode
from tests.swarm.conftest import SETTINGS
from tests.swarm.forkserver import ROOT
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
OVERFLOWING = """
import torch
from torch import nn
from gpt import build as build_gpt

class Overflowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.gpt = build_gpt(width=8, layers=1, heads=1, context=16)
        self.falls = nn.Parameter(torch.zeros(()))

    def forward(self, tokens, targets):
        loss = self.gpt(tokens, targets) + self.falls
        return loss.masked_fill(self.falls < 0, float("inf"))

build = Overflowing
"""


async def test_a_loss_that_is_not_finite_halts_the_run(swarm: Swarm) -> None:
    """From the second step on: of the first microbatch `init` would have said so."""
    folder = swarm.folder
    shutil.copy(ROOT / "hetpeer" / "examples" / "gpt.py", folder)
    (folder / "overflowing.py").write_text(OVERFLOWING)
    (folder / "text.txt").write_text("all work and no play makes jack a dull boy\n" * 200)
    options = [f"--{name}={value}" for name, value in SETTINGS.items()]
    model, data = f"--model={folder}/overflowing.py:build", f"--data={folder}/text.txt"
    author = swarm.start("author", "init", str(folder / "bad"), model, data, "--unchecked", *options)
    assert await author.ended() == 0, author.said
    swarm.run = RunDirectory.open(folder / "bad")

    bootstrap = await swarm.bootstrap(before="expects_nobody")
    volunteers = [swarm.volunteer(name) for name in ("one", "other")]
    for child in (bootstrap, *volunteers):
        assert await child.ended() == ExitCode.RUN_CLOSED, child.said
        last = child.said.splitlines()[-1]
        assert last.startswith(("HP-RUN-011: the run was halted", "HP-RUN-010: the run has stopped")), last
        assert "step 1" in last
        assert "not finite" in last
    assert [record["kind"] for record in swarm.records()][-1] == "halt"
    assert swarm.version == 1
