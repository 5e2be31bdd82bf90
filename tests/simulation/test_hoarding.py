"""Somebody claims to be the fastest, takes what it is given, and does nothing with it: what that costs the
others, in the simulator with the real cores.

The cores of coordinator and volunteers are those of the daemon; only its work is left out. It answers,
reduces and votes as it should, so that nothing but the ids themselves gives it away.
"""

from collections import Counter
from dataclasses import replace

import pytest

from hetpeer.stages.pipeline import effects as p
from tests.amounts import mostly_proof
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage

STEPS, MICROBATCHES = 24, 48
CONFIG = HistoryConfig(
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
    """Makes a volunteer of `swarm`, the last one, sit on every forward for which `sits` says so (the step's
    number).
    """

    def __init__(self, swarm, sits=lambda _step: True, name=HOARDER):
        self.asked = Counter()
        """Step → ids that it was to do."""
        self._sits = sits
        volunteer = swarm.volunteers[name]
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
    swarm = CheckedSwarm(7, config, CheckedSymbols(4), Coverage())
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
    limited = swarm.coordinator._context.issue_limits.limited
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


@pytest.mark.parametrize("seed", mostly_proof(range(4), [0]))
def test_three_at_three_stages_cost_some_stalls_the_first_time(seed):
    """Each has a pipeline of its own in its hand.

    Ids go ways that differ from then on, where the ones that are stuck give way to them; before, the run
    stood still for good: all went the same new way, past the next one, and honest windows were full of what
    nobody waited for any more.
    """
    layouts, hoarding = (((0, 1), (1, 2), (2, 3), (3, 4)),), ("v1", "v6", "v11")
    config = replace(CONFIG, volunteers=12, layouts=layouts, steps=4)
    swarm = CheckedSwarm(seed, config, CheckedSymbols(4), Coverage())
    hoarders = [Hoard(swarm, lambda step: step == 1, name) for name in hoarding]
    swarm.run(LIMIT_S)
    assert all(hoarder.asked[1] for hoarder in hoarders)
    assert len({swarm.volunteers[name].member.place for name in hoarding}) == 3
    usual, stuck, *after = [record["seconds"] for record in swarm.log if record["kind"] == "commit"]
    assert stuck < 100 * config.stall_s
    assert max(after) < 2 * usual


@pytest.mark.parametrize("seed", mostly_proof(range(7, 11), [7]))
def test_three_at_three_stages_do_not_stop_a_run_however_long_they_sit_on_their_work(seed):
    """Ids that went round the holders of all blocks in step met one of the three each time: no step ended.
    A step takes 3.5 s without them; in the first, honest ones that count nothing are limited, too.
    """
    layouts, hoarding = (((0, 1), (1, 2), (2, 3), (3, 4)),), ("v1", "v6", "v11")
    config = replace(
        CONFIG, volunteers=12, layouts=layouts, steps=30, microbatches=24, slot_capacity=2, speeds=(1.0,)
    )
    swarm = CheckedSwarm(seed, config, CheckedSymbols(4), Coverage())
    hoarders = [Hoard(swarm, name=name) for name in hoarding]
    swarm.run(LIMIT_S)
    assert len({swarm.volunteers[name].member.place for name in hoarding}) == 3
    assert all(hoarder.asked[0] for hoarder in hoarders)
    first, *after = [record["seconds"] for record in swarm.log if record["kind"] == "commit"]
    assert first < 20 * config.stall_s
    assert sum(after[-10:]) / 10 < 6.0
