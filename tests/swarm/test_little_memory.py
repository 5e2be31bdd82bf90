"""A volunteer that has no room for the activations of its blocks: it computes their forward twice."""

import pytest

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.step_workload import demand_of
from hetpeer.stages.pipeline.place_memory import PlaceDemand
from tests.swarm.forkserver import ROOT
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
MODEL = """
from gpt import GPT

def build():
    return GPT(width=32, layers=4, heads=2, context=64, vocabulary=256, dropout=0.1)
"""
SETTINGS = {
    "steps": 4,
    "batch-size": 64,
    "microbatch-size": 16,
    "sequence-length": 64,
    "eval-every": 2,
    "eval-samples": 16,
    "checkpoint-every": 2,
    "stages": 2,
}


async def test_a_run_with_a_volunteer_that_recomputes_is_that_of_one_machine(swarm: Swarm) -> None:
    folder = swarm.run.path.parent
    (folder / "wide.py").write_text(MODEL)
    (folder / "gpt.py").write_text((ROOT / "hetpeer" / "examples" / "gpt.py").read_text())
    given = [f"--model={folder}/wide.py:build", "--unchecked"]
    given += [f"--{name}={value}" for name, value in SETTINGS.items()]
    author = swarm.start("author", "init", str(swarm.folder / "wide"), *given)
    assert await author.ended() == 0, author.said
    swarm.run = RunDirectory.open(swarm.folder / "wide")
    manifest = swarm.run.manifest
    places = [
        PlaceDemand.of_all([demand_of(manifest, block) for block in manifest.blocks[begin:end]])
        for begin, end in manifest.layouts[0]
    ]
    limit = max(place.in_one_memory - place.recomputable for place in places)
    assert limit < min(place.activations for place in places), "no place fits with its activations"
    bootstrap = await swarm.bootstrap()
    with_bundles = limit * 8 // 7 + 8
    both = [swarm.volunteer(name, before=f"room_for_a_model:{with_bundles}") for name in ("one", "other")]
    await swarm.finished(bootstrap, *both)
    logs = [(child.home / "daemon.log").read_text() for child in both]
    assert ["getting blocks 0-2" in log for log in logs].count(True) == 1
    for log in logs:
        # whoever has the loss has one microbatch under way, and all of that while it is at work
        assert ("of 3 blocks compute their forward twice" in log) == ("getting blocks 0-2" in log)
    swarm.exact()
