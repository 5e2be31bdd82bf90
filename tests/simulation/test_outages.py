"""The coordinator is away for a while, in virtual time: nobody lost anything, so nothing is done again."""

from dataclasses import replace

import pytest

from hetpeer.bootstrap.state.effects import CoordinatorConfig
from hetpeer.dht.channels.redial import LONGEST_PAUSE_S, REDIAL_S, SPARE_S, longest_absence_s, pause_s
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import LAYOUTS
from tests.simulation.lying_swarms import BLOCKS, said

CONFIG = HistoryConfig(volunteers=2, layouts=LAYOUTS[1], steps=20, checkpoint_every=10)
OUTAGES_S = (5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 240.0)


class Outage(CheckedSwarm):
    """A run of `peers` reliable peers, whose coordinator waits as long as that number asks for."""

    peers = 1

    def _core_config(self) -> CoordinatorConfig:
        return replace(super()._core_config(), return_s=longest_absence_s(self.peers))


def played(away_s: float, peers: int, found_s: float) -> Outage:
    """A run whose coordinator is killed at each step after the checkpoint, in turn; all of it is played.

    The volunteers find it again `found_s` seconds after its return.
    """
    swarm = Outage(5, CONFIG, CheckedSymbols(BLOCKS), Coverage())
    swarm.peers = peers

    def crash(what: str) -> None:
        commits = len(said(swarm, "commit"))
        if what == "record commit" and commits in (3, 15):
            swarm.world.after(0.3, lambda: swarm.crash_coordinator(away_s, (found_s, found_s)))

    swarm.hooks.append(crash)
    swarm.run(3000.0)
    assert len(said(swarm, "reign")) == 3
    return swarm


@pytest.mark.parametrize("peers", [1, 3, 5])
@pytest.mark.parametrize("away_s", OUTAGES_S)
def test_an_outage_of_the_coordinator_costs_no_step(away_s: float, peers: int) -> None:
    """Also if every volunteer has just begun to try another reliable peer when it is back."""
    swarm = played(away_s, peers, longest_absence_s(peers) - SPARE_S)
    assert not said(swarm, "rollback")
    assert len(said(swarm, "commit")) == CONFIG.steps


def test_a_volunteer_that_comes_too_late_costs_steps() -> None:
    """Otherwise the test above would see nothing."""
    assert said(played(30.0, 1, longest_absence_s(1) + 1.0), "rollback")


def test_the_pause_between_two_tries_does_not_grow() -> None:
    """However long the coordinator was away."""
    assert max(map(pause_s, range(1000))) == REDIAL_S[-1] < LONGEST_PAUSE_S < longest_absence_s(1)
