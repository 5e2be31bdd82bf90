"""Volunteers that give false numbers, in the simulator: found out, banned, and nothing of theirs is committed (docs/trust.md)."""

import dataclasses

import pytest

from hetpeer.peer.simulate.config import SwarmConfig
from hetpeer.peer.simulate.coverage import Coverage
from hetpeer.peer.simulate.faults import Faults
from hetpeer.peer.simulate.numerics import Symbols
from hetpeer.peer.simulate.swarm import Swarm

BLOCKS = 4
FOUR_OF_ONE = SwarmConfig(volunteers=4, layouts=(((0, 4),),), check_share=1.0)
"""All hold everything."""
TWO_STAGES = SwarmConfig(volunteers=8, layouts=(((0, 2), (2, 4)),), check_share=1.0)


def history(config, seed, faults=0):
    swarm = Swarm(seed, config, Symbols(BLOCKS), Coverage())
    Faults(swarm, faults)
    swarm.run(900.0)
    return swarm


def banned(swarm):
    return {record["peer"] for record in swarm.log if record["kind"] == "banned"}


@pytest.mark.parametrize("config", [FOUR_OF_ONE, TWO_STAGES], ids=["one stage", "two stages"])
@pytest.mark.parametrize("seed", range(4))
def test_honest_volunteers_are_checked_and_nobody_is_banned(config, seed):
    swarm = history(config, seed)
    assert not banned(swarm)
    assert not [record for record in swarm.log if record["kind"] == "dispute"]


@pytest.mark.parametrize("config", [FOUR_OF_ONE, TWO_STAGES], ids=["one stage", "two stages"])
@pytest.mark.parametrize("seed", range(4))
def test_who_sends_false_sums_is_banned_before_any_of_them_is_committed(config, seed):
    swarm = history(dataclasses.replace(config, lies={"v1": "sends"}), seed)
    assert banned(swarm) == {"v1"}  # and the run has ended in the state of one machine, which `run` has looked at
