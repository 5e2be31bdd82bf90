"""Histories of simulated swarms in which somebody lies, and what the log says of them."""

import dataclasses

from hetpeer.peer.simulate.proofs.coverage import Coverage
from hetpeer.peer.simulate.proofs.faults import Faults
from hetpeer.peer.simulate.proofs.histories import LAYOUTS
from hetpeer.peer.simulate.sim_config import SwarmConfig
from hetpeer.peer.simulate.sim_numerics import Symbols
from hetpeer.peer.simulate.sim_swarm import Swarm

BLOCKS = 4
STEPS = 12
PAIRS = {
    "two": SwarmConfig(volunteers=2, layouts=LAYOUTS[0]),
    "two stages": SwarmConfig(volunteers=4, layouts=LAYOUTS[1]),
}
"""Where it is word against word."""


def history(config, seed, faults=0):
    """The swarm at the run's end."""
    swarm = Swarm(seed, config, Symbols(BLOCKS), Coverage())
    Faults(swarm, faults)
    swarm.run(900.0)
    return swarm


def lying(config, lie, seed=0, faults=0, **more):
    """The last volunteer lies, if there is a `lie`. Returns the swarm at the run's end, and who that is."""
    liar = f"v{config.volunteers - 1}"
    lies = {liar: lie} if lie else {}
    config = dataclasses.replace(config, **{"lies": lies, "steps": STEPS, "evaluate_every": 100} | more)
    return history(config, seed, faults), liar


def said(swarm, kind):
    return [record for record in swarm.log if record["kind"] == kind]
