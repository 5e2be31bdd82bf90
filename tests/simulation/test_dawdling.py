"""Volunteers that take a place, again and again as others, and never have the state that they are to fetch:
what they cost those who train, in the simulator with the real cores.
"""

from dataclasses import replace

import pytest

from hetpeer.bootstrap.coordinator.step_barrier import ADVANCE, SHARE
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import LAYOUTS
from tests.simulation.lying_swarms import BLOCKS, said

CONFIG = HistoryConfig(volunteers=7, layouts=LAYOUTS[1], steps=150, evaluate_every=100, speeds=(1.0,))
AGAIN_S = 25.0
"""Then it begins another session."""
BORDER_S = 1.0
"""Virtual seconds between a commit and the next step, at most, if nobody is waited for: those who come later
have to load graphs.
"""


def played(dawdlers):
    """Seconds of the run between two steps, and those of its steps."""
    swarm = CheckedSwarm(
        3, replace(CONFIG, lies=dict.fromkeys(dawdlers, "dawdles")), CheckedSymbols(BLOCKS), Coverage()
    )

    def again(name):
        volunteer = swarm.volunteers[name]
        if volunteer.alive:
            volunteer.kill()
            volunteer.start()
        swarm.world.after(AGAIN_S, lambda: again(name))

    for name in dawdlers:
        swarm.world.after(AGAIN_S, lambda name=name: again(name))
    swarm.run(3000.0)
    assert len(said(swarm, "commit")) == CONFIG.steps
    trained = sum(record["seconds"] for record in said(swarm, "commit"))
    return swarm.world.now - trained, trained


@pytest.mark.parametrize(
    "dawdlers",
    [pytest.param(("v6",), marks=pytest.mark.proof), ("v4", "v5", "v6")],
    ids=["one", "three"],
)
def test_what_is_waited_in_vain_is_a_share_of_the_time_that_is_trained(dawdlers):
    without, _ = played(())
    waited, trained = played(dawdlers)
    assert waited - without <= ADVANCE * CONFIG.sync_s + SHARE * trained + BORDER_S
