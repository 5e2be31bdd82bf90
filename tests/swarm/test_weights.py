"""Masked labels in a real swarm: its curve is that of whole batches, and a replay proves it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.authoring.user_code import build_model
from hetpeer.bootstrap.run.run_directory import RunDirectory
from tests.bootstrap.weighted_data import write_source
from tests.swarm.swarm import Swarm
from tests.swarm.test_reliable import kill_the_leader, leader

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
STEPS, BATCH = 12, 12
SETTINGS = {
    "steps": STEPS,
    "batch-size": BATCH,
    "microbatch-size": 1,
    "eval-every": 6,
    "eval-samples": 7,
    "checkpoint-every": 4,
    "learning-rate": 0.01,
    "seed": 3,
}
"""A fifth of the samples has no target: so have microbatches of one sample."""


def whole_batches(run: RunDirectory) -> list[float]:
    """Losses of plain torch, which computes each batch at once."""
    training, batches = run.manifest.training, run.batches()
    model = build_model(run.author().model, run.manifest.seed).train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=training.learning_rate,
        betas=training.optimizer.betas,
        eps=training.optimizer.eps,
        weight_decay=training.weight_decay,
    )
    losses = []
    for step in range(STEPS):
        parts = [batches.microbatch(step, number) for number in range(BATCH)]
        whole = {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in parts[0]}
        optimizer.zero_grad()
        loss = model(**whole)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


async def make(swarm: Swarm) -> None:
    """A run with masked samples in two stages."""
    source = write_source(swarm.folder)
    given = [f"--model={source}:Rows", f"--data={source}:data", "--stages=2", "--unchecked"]
    given += [f"--{name}={value}" for name, value in SETTINGS.items()]
    author = swarm.start("author", "init", str(swarm.folder / "masked"), *given)
    assert await author.ended() == 0, author.said
    swarm.run = RunDirectory.open(swarm.folder / "masked")


async def test_a_masked_run_has_the_curve_of_whole_batches(swarm: Swarm) -> None:
    await make(swarm)
    bootstrap = await swarm.bootstrap(together=2)
    await swarm.finished(bootstrap, *(swarm.volunteer(name) for name in ("one", "other")))
    commits = swarm.records("commit")
    assert any(commit.get("skipped") for commit in commits)
    assert not swarm.records("bad_sample")
    assert [commit["loss"] for commit in commits] == pytest.approx(whole_batches(swarm.run), rel=1e-5)
    verdict = audit(swarm.run.path)
    assert verdict.ok, verdict.problems
    again = replay(swarm.run.path)
    assert (again.problems, again.equal) == ([], STEPS)


@pytest.mark.proof
async def test_the_next_coordinator_knows_the_weights(swarm: Swarm, tmp_path: Path) -> None:
    await make(swarm)
    paths, peers, rest, volunteers = await kill_the_leader(swarm, tmp_path)
    await swarm.finished(*rest, *volunteers)
    last = leader(rest)
    assert last is not None
    swarm.run = RunDirectory.open(paths[peers.index(last)])
    commits = swarm.records("commit")
    assert [commit["loss"] for commit in commits] == pytest.approx(
        whole_batches(RunDirectory.open(paths[0])), rel=1e-5
    )
