"""Volunteers that keep what updates need in memory and on the disk hold equal bits, and say where it is."""

import re

import pytest

from hetpeer.peer.control.control_client import ask
from hetpeer.peer.control.control_messages import ControlRequest
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


async def test_all_kinds_of_offload_train_one_run_to_the_same_bits(swarm: Swarm) -> None:
    """Each holds the whole model, so their states are compared at every step, and with one machine's."""
    training = swarm.run.manifest.training.model_copy(update={"steps": 8, "checkpoint_every": 4})
    swarm.run = resign(swarm.run, training=training, layouts=(((0, len(swarm.run.manifest.blocks)),),))
    await swarm.bootstrap(together=3)
    kinds = {"none": "optimizer in memory", "host": "optimizer in memory", "disk": "optimizer on the disk"}
    volunteers = {kind: swarm.volunteer(kind, "--offload", kind) for kind in kinds}
    for kind, volunteer in volunteers.items():
        await volunteer.says("you are contributing")
        figures = ask(volunteer.home, ControlRequest(do="status")).figures
        assert figures is not None
        offered, _, where = figures.memory.partition("; ")
        assert re.fullmatch(r"offers .+ of memory \(of .+ the program itself takes .+ MiB\)", offered)
        assert where == kinds[kind]
    await swarm.finished(*volunteers.values())
    swarm.exact()
