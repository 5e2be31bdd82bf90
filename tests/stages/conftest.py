"""An arena, and an engine that works in it without a process."""

import pytest

from hetpeer.stages.execution.arena import Arena
from tests.stages.compute_rig import cpu_engine


@pytest.fixture
def arena():
    made = Arena(16 << 20)
    yield made
    made.close()


@pytest.fixture
def engine(arena):
    return cpu_engine(arena)
