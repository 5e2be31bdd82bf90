"""The coordinator's own line is cut for a while: nobody is to blame, so no lease runs out."""

from dataclasses import replace

import pytest

from hetpeer.dht.channels.redial import longest_absence_s
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import LAYOUTS
from tests.simulation.lying_swarms import BLOCKS, said
from tests.simulation.test_frozen_holders import Silent

CONFIG = HistoryConfig(volunteers=2, layouts=LAYOUTS[1], steps=18, checkpoint_every=10)
OVERLAPPING = replace(CONFIG, staleness=1)


def played(config: HistoryConfig, moment: str, count: int, cut_s: float, *, noticed: bool) -> Silent:
    """A run in which nobody is heard for `cut_s` seconds once `moment` has happened `count` times.

    All streams break within a second. `noticed`: the coordinator sees that it is all of them.
    """
    swarm = Silent(5, config, CheckedSymbols(BLOCKS), Coverage())
    left = count

    def cut() -> None:
        for at_s, (name, volunteer) in enumerate(swarm.volunteers.items()):
            volunteer.freeze(cut_s)
            swarm.world.after(0.5 * at_s, lambda name=name: swarm.stream_broken(name))
        if noticed:
            swarm.world.after(1.2, lambda: swarm.host.event("renewed", renewed))

    def renewed(core, now):
        core.renewed(now)
        return []

    def hook(what: str) -> None:
        nonlocal left
        left -= what == moment
        if what == moment and left == 0:
            swarm.world.after(0.01, cut)

    swarm.hooks.append(hook)
    swarm.run(3000.0)
    assert left <= 0
    return swarm


@pytest.mark.parametrize("config", [CONFIG, OVERLAPPING], ids=["one step", "two steps"])
@pytest.mark.parametrize(("moment", "count"), [("record commit", 13), ("tell vote", 27), ("tell sealed", 80)])
def test_nobody_is_given_up_while_our_own_line_is_cut(moment: str, count: int, config: HistoryConfig) -> None:
    """Up to the time in which a coordinator that was away is found."""
    swarm = played(config, moment, count, longest_absence_s(1) - 1.0, noticed=True)
    assert not said(swarm, "gone")
    assert not said(swarm, "rollback")
    assert len(said(swarm, "commit")) == config.steps


def test_otherwise_all_would_be_given_up() -> None:
    """Otherwise the test above would see nothing."""
    swarm = played(CONFIG, "record commit", 13, longest_absence_s(1) - 1.0, noticed=False)
    assert len(said(swarm, "gone")) >= 2


def test_volunteers_that_stay_away_are_lost_then() -> None:
    assert said(played(CONFIG, "record commit", 13, longest_absence_s(1) + 2.0, noticed=True), "gone")
