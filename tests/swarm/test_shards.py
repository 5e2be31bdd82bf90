"""A holder dies at each shard of a reduce, and of an averaging, whose blocks are several shards long."""

import asyncio
import shutil
import signal

import pytest

from hetpeer.averaging.reduce.reduce_shards import LENGTH
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import AveragingSettings
from tests.swarm.child import Child, until
from tests.swarm.forkserver import ROOT, ForkServer
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.grid, pytest.mark.timeout(400)]

LEASE_S = 10.0
STEPS = 6
ENDLESS = 100_000
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
"""A stage is two blocks, one of them a layer, whose half is three shards: the first step and the next
one's first shard.
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> RunDirectory:
    """A run whose layers have 790,000 parameters."""
    folder = tmp_path_factory.mktemp("wide")
    shutil.copy(ROOT / "hetpeer" / "examples" / "gpt.py", folder)
    (folder / "wide.py").write_text(MODEL)
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(400)))
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    arguments = ["init", str(folder / "run"), f"--model={folder}/wide.py:build", f"--data={folder}/text.txt"]
    arguments.append("--unchecked")
    log = str(folder / "init.log")
    pid = server.start(arguments=[*arguments, *options], home=str(folder), out=log, err=log)
    asyncio.run(until(lambda: server.status(pid) is not None, "hetpeer init is done", within_s=100.0))
    run = RunDirectory.open(folder / "run")
    assert max(block.parameter_count for block in run.manifest.blocks) > 5 * LENGTH
    return run


def use(swarm: Swarm, run: RunDirectory) -> None:
    """Have `swarm` train a copy of `run`."""
    shutil.rmtree(swarm.run.path)
    shutil.copytree(run.path, swarm.run.path)
    swarm.run = RunDirectory.open(swarm.run.path)


async def killed_and_started_again(swarm: Swarm, cell: str, names: str) -> list[Child]:
    """The swarm's volunteers.

    Whoever gets to `cell` first dies there and comes back, as the first of them: it depends on lines who
    reduces.
    """
    await swarm.bootstrap(*(["--keep-places"] if swarm.run.manifest.averaging else []))
    cell = f"{cell}@{swarm.folder}/died"
    volunteers = {name: swarm.volunteer(name, fail=cell) for name in names}

    def died() -> str | None:
        return next((name for name, one in volunteers.items() if one.status is not None), None)

    name = await until(died, f"somebody gets to {cell}", within_s=90.0)
    assert name is not None
    victim = volunteers.pop(name)
    assert victim.status == -signal.SIGKILL, victim.said
    return [swarm.volunteer("back", home=victim.home), *volunteers.values()]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("phase", ["send_part", "sum_parts", "send_result"])
async def test_a_reduce(swarm: Swarm, wide: RunDirectory, phase: str, shard: int) -> None:
    use(swarm, wide)
    back, *others = await killed_and_started_again(swarm, f"{phase}:{shard}", "abcd")
    await swarm.finished(swarm.children[0], *others)
    if back.status is None:  # it came when all was over
        back.signal(signal.SIGINT)
    swarm.exact()
    assert max(record["seconds"] for record in swarm.records("commit")) < LEASE_S


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("phase", ["send_part", "sum_parts", "send_result"])
async def test_an_averaging(swarm: Swarm, wide: RunDirectory, phase: str, shard: int) -> None:
    """A cluster has one holder of each block: it falls apart, the other goes on without it until there is
    a new one. Every other averaging is a delayed one.
    """
    use(swarm, wide)
    settings = swarm.run.manifest.training.model_copy(update={"steps": ENDLESS})
    averaging = AveragingSettings(span=2, delayed=shard % 2 == 0)
    swarm.run = resign(swarm.run, averaging=averaging, training=settings)
    volunteers = await killed_and_started_again(swarm, f"average_{phase}:{shard}", "abcd")

    def averages_again() -> bool:
        kinds = [(r["kind"], len(r.get("clusters", ()))) for r in swarm.records()]
        return ("dissolved", 0) in kinds and ("average", 2) in kinds[kinds.index(("dissolved", 0)) :]

    await until(averages_again, "there are two clusters again that average", within_s=90.0)
    await swarm.left_in_order(volunteers)
    assert max(record["seconds"] for record in swarm.records("average")) < LEASE_S
