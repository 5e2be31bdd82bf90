"""Histories of simulated swarms in which somebody lies, and what the log says of them."""

import dataclasses

from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.faults import Faults
from tests.simulation.histories import LAYOUTS

BLOCKS = 4
STEPS = 12
PAIRS = {
    "two": HistoryConfig(volunteers=2, layouts=LAYOUTS[0]),
    "two stages": HistoryConfig(volunteers=4, layouts=LAYOUTS[1]),
}
"""Where it is word against word."""


def history(config, seed, faults=0, limit_s=900.0):
    """The swarm at the run's end, after `limit_s` virtual seconds at most."""
    swarm = CheckedSwarm(seed, config, CheckedSymbols(BLOCKS), Coverage())
    Faults(swarm, faults)
    swarm.run(limit_s)
    return swarm


def lying(config, lie, seed=0, faults=0, **more):
    """The last volunteer lies, if there is a `lie`. Returns the swarm at the run's end, and who that is."""
    liar = f"v{config.volunteers - 1}"
    lies = {liar: lie} if lie else {}
    config = dataclasses.replace(config, **{"lies": lies, "steps": STEPS, "evaluate_every": 100} | more)
    return history(config, seed, faults), liar


def said(swarm, kind):
    return [record for record in swarm.log if record["kind"] == kind]
