"""The last holder of a block stands still beyond its lease, and thaws with everything in memory."""

from dataclasses import replace

import pytest

from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import LAYOUTS
from tests.simulation.lying_swarms import BLOCKS, said

CONFIG = HistoryConfig(volunteers=2, layouts=LAYOUTS[1], steps=18, checkpoint_every=10)
OVERLAPPING = replace(CONFIG, staleness=1)


class Silent(CheckedSwarm):
    """Nobody repeats the messages of a frozen volunteer, so that its lease runs out."""

    def _echo(self) -> None:
        pass


def played(config: HistoryConfig, moment: str, count: int, act, seed: int = 5) -> CheckedSwarm:
    """A run in which `act(swarm, volunteer)` comes when `moment` has happened `count` times."""
    swarm = Silent(seed, config, CheckedSymbols(BLOCKS), Coverage())
    left = count

    def hook(what: str) -> None:
        nonlocal left
        left -= what == moment
        if what == moment and left == 0:
            swarm.world.after(0.01, lambda: act(swarm, swarm.volunteers["v1"]))

    swarm.hooks.append(hook)
    swarm.run(3000.0)
    assert left <= 0
    return swarm


def lost_steps(swarm: CheckedSwarm) -> int:
    """Committed steps that were done again."""
    return len(said(swarm, "commit")) - swarm.config.steps


def freeze(seconds: float, of: tuple[str, ...] = ("v1",)):
    def act(swarm: CheckedSwarm, _volunteer: object) -> None:
        for name in of:
            swarm.volunteers[name].freeze(seconds)

    return act


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("config", [CONFIG, OVERLAPPING], ids=["one step", "two steps"])
@pytest.mark.parametrize("moment", ["record commit", "tell vote", "tell sealed"])
def test_the_last_holder_of_a_block_thaws_and_nothing_is_lost(
    moment: str, config: HistoryConfig, seed: int
) -> None:
    """It is given up when its lease runs out, and taken back with the state that it holds."""
    swarm = played(
        config, moment, {"record commit": 13, "tell vote": 27, "tell sealed": 80}[moment], freeze(15.0), seed
    )
    assert said(swarm, "gone")
    assert lost_steps(swarm) == 0


@pytest.mark.parametrize("config", [CONFIG, OVERLAPPING], ids=["one step", "two steps"])
def test_all_of_them_thaw_and_nothing_is_lost(config: HistoryConfig) -> None:
    """A switch that was off for a while."""
    assert lost_steps(played(config, "record commit", 13, freeze(15.0, ("v0", "v1")))) == 0


def test_it_is_waited_for_as_long_as_its_steps_took() -> None:
    """They would have to be trained again; slow steps are worth a longer wait."""
    slow = replace(CONFIG, microbatches=60)
    assert lost_steps(played(slow, "record commit", 19 - 1, freeze(15.0))) == 0
    swarm = played(slow, "record commit", 17, freeze(60.0))
    trained_s = [record["seconds"] for record in said(swarm, "commit")]
    assert sum(trained_s[10:17]) > 60.0
    assert lost_steps(swarm) == 0


def test_one_that_stays_away_is_not_waited_for_without_end() -> None:
    """The run goes back to its checkpoint, and others take the place."""
    config = replace(CONFIG, volunteers=3)
    swarm = played(config, "record commit", 13, lambda _swarm, volunteer: volunteer.kill())
    (back,) = [record for record in said(swarm, "rollback") if record["to_version"] == 10]
    assert back["why"] == "the holders of the last version did not come back in time"


def test_one_that_comes_back_with_nothing_ends_the_wait() -> None:
    """It was killed and started again."""

    def restart(swarm: CheckedSwarm, volunteer) -> None:
        volunteer.kill()
        swarm.world.after(0.5, volunteer.start)

    swarm = played(CONFIG, "record commit", 13, restart)
    (back,) = said(swarm, "rollback")
    assert back["to_version"] == 10
