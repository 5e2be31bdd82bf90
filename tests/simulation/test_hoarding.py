"""Somebody claims to be the fastest, takes what it is given, and does nothing with it: what that costs the others, in the simulator with the real cores.

The cores of coordinator and volunteers are those of the daemon; only its work is left out. It answers, reduces and votes as it should, so that nothing but the
ids themselves gives it away.
"""

from collections import Counter
from dataclasses import replace

import pytest

from hetpeer.peer.simulate.config import SwarmConfig
from hetpeer.peer.simulate.coverage import Coverage
from hetpeer.peer.simulate.numerics import Symbols
from hetpeer.peer.simulate.swarm import Swarm
from hetpeer.stages.execution import effects as p

STEPS, MICROBATCHES = 24, 48
CONFIG = SwarmConfig(
    volunteers=4,
    layouts=(((0, 2), (2, 4)),),
    steps=STEPS,
    microbatches=MICROBATCHES,
    evaluation_microbatches=1,
    evaluate_every=100,
    slot_capacity=4,
    checkpoint_every=8,
    speeds=(1.0,),
    stall_s=5.0,
    duplicates=0.0,
)
HOARDER = "v4"
LIMIT_S = 3000.0


class Hoard:
    """Makes the last volunteer of `swarm` sit on every forward for which `sits` says so (the step's number)."""

    def __init__(self, swarm, sits=lambda _step: True):
        self.asked = Counter()
        """Step → ids that it was to do."""
        self._sits = sits
        volunteer = swarm.volunteers[HOARDER]
        self._perform = volunteer._perform_in_step
        volunteer._perform_in_step = self.perform

    def perform(self, step, effect):
        if isinstance(effect, p.RunForward):
            self.asked[step.number] += 1
            if self._sits(step.number):
                return
        self._perform(step, effect)


def played(config, *, hoards=None):
    """A whole run. Returns it, its hoarder, and how long each step took."""
    swarm = Swarm(7, config, Symbols(4), Coverage())
    hoarder = Hoard(swarm, hoards) if hoards is not None else None
    swarm.run(LIMIT_S)
    return swarm, hoarder, [record["seconds"] for record in swarm.log if record["kind"] == "commit"]


@pytest.fixture(scope="module")
def honest():
    """Seconds of a step without it."""
    _, _, seconds = played(CONFIG)
    return seconds


WITH = replace(CONFIG, volunteers=5, speeds=(1.0, 1.0, 1.0, 1.0, 20.0))


def test_after_three_times_it_costs_a_tenth_at_most(honest):
    swarm, hoarder, seconds = played(WITH, hoards=lambda _step: True)
    assert len(seconds) == STEPS
    limited = swarm.coordinator._reign.allowances._limited
    assert set(limited) == {HOARDER}, "nobody honest is limited"
    tried = sorted(hoarder.asked)
    assert len(tried) >= 3
    after = tried[2] + 1
    usual = sum(honest[1:]) / len(honest[1:])
    rest = seconds[after:]
    assert len(rest) >= 8
    assert sum(rest) / len(rest) <= usual / 0.9


def test_who_was_stuck_once_is_given_its_share_again(honest):
    _, hoarder, seconds = played(WITH, hoards=lambda step: step == 1)
    assert hoarder.asked[2] == 0
    assert hoarder.asked[STEPS - 1] >= MICROBATCHES // 4
    assert seconds[-1] < max(honest)
