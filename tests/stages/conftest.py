"""An arena, an engine that works in it without a process, and a holder of all blocks of a tiny model."""

import pytest

from hetpeer.stages.ipc.arena import Arena
from tests.stages.compute_rig import MODEL, Holder, cpu_engine, submitter, tiny_blocks


@pytest.fixture
def arena():
    made = Arena(16 << 20)
    yield made
    made.close()


@pytest.fixture
def engine(arena):
    return cpu_engine(arena)


@pytest.fixture
async def holder(engine, arena):
    """Holds the whole model."""
    made = Holder(submitter(engine), arena, tiny_blocks())
    await made.load(MODEL)
    return made
