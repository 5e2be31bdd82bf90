"""A holder dies at each shard of a reduce, and of an averaging, whose blocks are several shards long."""

import asyncio
import shutil
import signal

import pytest

from hetpeer.averaging.reduction import LENGTH
from hetpeer.bootstrap.audit import audit
from hetpeer.bootstrap.replay import ReferenceRun, run_reference
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.bootstrap.settings import AveragingSettings
from tests.swarm.forkserver import ROOT, ForkServer
from tests.swarm.swarm import Child, Swarm, resign, until

pytestmark = [pytest.mark.swarm, pytest.mark.grid, pytest.mark.timeout(240)]

LEASE_S = 10.0
STEPS = 6
MODEL = """
from gpt import build as build_gpt

def build():
    return build_gpt(width=256, layers=2, heads=2, context=16)
"""
OPTIONS = {
    "steps": STEPS,
    "batch-size": 8,
    "microbatch-size": 2,
    "sequence-length": 16,
    "checkpoint-every": 2,
}
SHARDS = range(1, 8)
"""A stage is two blocks, one of them a layer, whose half is three shards: the first step and the next one's first shard."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> tuple[RunDirectory, ReferenceRun]:
    """A run whose layers have 790,000 parameters, and what one machine makes of it."""
    folder = tmp_path_factory.mktemp("wide")
    shutil.copy(ROOT / "examples" / "gpt.py", folder)
    (folder / "wide.py").write_text(MODEL)
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(400)))
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    arguments = ["init", str(folder / "run"), f"--model={folder}/wide.py:build", f"--data={folder}/text.txt"]
    log = str(folder / "init.log")
    pid = server.start(arguments=[*arguments, *options], home=str(folder), out=log, err=log)
    asyncio.run(until(lambda: server.status(pid) is not None, "hetpeer init is done", within_s=100.0))
    run = RunDirectory.open(folder / "run")
    assert max(block.parameter_count for block in run.manifest.blocks) > 5 * LENGTH
    return run, run_reference(run.path, STEPS)


def use(swarm: Swarm, run: RunDirectory) -> None:
    """Have `swarm` train a copy of `run`."""
    shutil.rmtree(swarm.run.path)
    shutil.copytree(run.path, swarm.run.path)
    swarm.run = RunDirectory.open(swarm.run.path)


async def killed_and_started_again(swarm: Swarm, cell: str, names: str) -> list[Child]:
    """The swarm's volunteers, of whom the first dies at `cell` and comes back; returns when the run is over."""
    bootstrap = await swarm.bootstrap()
    volunteers = [swarm.volunteer(name, fail=cell if name == names[0] else "") for name in names]
    assert await volunteers[0].ended(90.0) == -signal.SIGKILL, volunteers[0].said
    back = swarm.volunteer("back", home=volunteers[0].home)
    await swarm.finished(bootstrap, *volunteers[1:], within_s=120.0)
    if back.status is None:  # it came when all was over
        back.signal(signal.SIGINT)
    return volunteers


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("phase", ["send_part", "sum_parts", "send_result"])
async def test_a_reduce(
    swarm: Swarm, wide: tuple[RunDirectory, ReferenceRun], phase: str, shard: int
) -> None:
    run, reference = wide
    use(swarm, run)
    await killed_and_started_again(swarm, f"{phase}:{shard}", "abcd")
    swarm.exact(reference)
    assert max(record["seconds"] for record in swarm.records("commit")) < LEASE_S


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("phase", ["send_part", "sum_parts", "send_result"])
async def test_an_averaging(
    swarm: Swarm, wide: tuple[RunDirectory, ReferenceRun], phase: str, shard: int
) -> None:
    """A cluster has one holder of each block: it falls apart, the other finishes without it."""
    use(swarm, wide[0])
    settings = swarm.run.manifest.training.model_copy(update={"steps": 4 * STEPS})
    swarm.run = resign(swarm.run, averaging=AveragingSettings(span=2), training=settings)
    await killed_and_started_again(swarm, f"average_{phase}:{shard}", "abcd")
    verdict = audit(swarm.run.path)
    assert verdict.ok, verdict.problems
    assert verdict.steps == verdict.steps_planned
    assert max(record["seconds"] for record in swarm.records("average")) < LEASE_S
