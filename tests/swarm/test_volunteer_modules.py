"""A volunteer carries no part of the coordinator: what a real daemon has loaded when it leaves."""

import sys
from pathlib import Path

import pytest

from hetpeer.peer.process.hetpeer_children import Child, end_all
from tests.swarm.child import LEAVE_S
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
MOST_OF_BOOTSTRAP = 30
"""Modules of hetpeer.bootstrap that a volunteer may load, packages not counted."""
ENTRY = """
import atexit, pathlib, sys

def note():
    loaded = [name for name, module in sys.modules.items() if not hasattr(module, "__path__")]
    pathlib.Path({path!r}).write_text("\\n".join(sorted(loaded)))

atexit.register(note)
from hetpeer.peer.cli.main import run
run()
"""
"""hetpeer, with the names of its modules in a file when it ends."""


async def test_a_volunteer_loads_few_modules_of_the_bootstrap_package(swarm: Swarm, tmp_path: Path) -> None:
    training = swarm.run.manifest.training.model_copy(update={"steps": 1000, "checkpoint_every": 2})
    layouts = (((0, len(swarm.run.manifest.blocks)),),)
    swarm.run = resign(swarm.run, training=training, layouts=layouts)
    await swarm.bootstrap()
    path = tmp_path / "modules.txt"
    volunteer = await Child.start(
        "volunteer",
        ("join", "--bootstrap", swarm.address, "--host", "127.0.0.1", "--name", "a"),
        home=tmp_path / "a",
        log=tmp_path / "a.log",
        command=(sys.executable, "-P", "-c", ENTRY.format(path=str(path))),
    )
    try:
        await swarm.stored(2)
        await volunteer.end(LEAVE_S)
        assert volunteer.status == 0
    finally:
        await end_all([volunteer])
    loaded = path.read_text().split()
    assert "hetpeer.peer.daemon.volunteer_life" in loaded
    roots = {name.partition(".")[0] for name in loaded}
    assert roots.isdisjoint({"torch", "networkx", "transformers"})
    ours = [name for name in loaded if name.startswith("hetpeer.bootstrap.")]
    assert len(ours) <= MOST_OF_BOOTSTRAP, ours
