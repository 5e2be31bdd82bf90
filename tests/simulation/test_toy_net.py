"""A real net with a tied weight, trained through 100 kills, has the loss curve of one process that was left
in peace.
"""

from dataclasses import replace

import pytest
import torch

from hetpeer.bootstrap.log.history import History
from hetpeer.peer.simulate.sim_hooks import ViolationError
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.faults import Kills
from tests.simulation.mutants import MUTANTS
from tests.simulation.toy_net import ToyNet

STEPS, MICROBATCHES, KILLS = 200, 6, 100
GATE = 1e-6
"""Relative. The order of additions alone makes 1e-7; one id of six lost in one step makes 1e-3."""

CONFIG = HistoryConfig(
    volunteers=6,
    layouts=(((0, 1), (1, 4)), ((0, 3), (3, 4)), ((0, 2), (2, 4))),
    steps=STEPS,
    microbatches=MICROBATCHES,
    slot_capacity=2,
    checkpoint_every=5,
    clip_norm=0.5,
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def curve(seed, kills, steps=STEPS, **changes):
    """Losses from the coordinator's commit records, and the swarm."""
    net = ToyNet(seed=seed)
    swarm = CheckedSwarm(seed, replace(CONFIG, steps=steps, ties=net.ties, **changes), net, Coverage())
    Kills(swarm, kills, interval_s=3.0)
    swarm.run(4000.0)
    commits = History.of(swarm.log).commits
    return [commits[step]["loss"] for step in range(steps)], swarm


def difference(losses, seed, bases=None):
    alone = ToyNet(seed=seed).train_alone(bases or range(len(losses)), MICROBATCHES, CONFIG.clip_norm)
    assert alone[-1] < 0.8 * alone[0]
    return max(abs(mine - one) / one for mine, one in zip(losses, alone, strict=True))


@pytest.mark.proof
def test_the_curve_through_many_kills_is_that_of_one_process():
    losses, swarm = curve(0, KILLS)
    assert swarm.faults == KILLS
    assert difference(losses, 0) <= GATE


@pytest.mark.proof
def test_steps_that_overlap_have_the_curve_of_one_process_with_the_same_delays():
    staleness = 2
    losses, swarm = curve(0, KILLS // 2, STEPS // 2, staleness=staleness, evaluate_every=20)
    commits = History.of(swarm.log).commits
    behind = [commits[step].get("behind", 0) for step in range(len(losses))]
    assert max(behind) == staleness
    assert sum(map(bool, behind)) > len(behind) // 4
    assert difference(losses, 0, [step - late for step, late in enumerate(behind)]) <= GATE
    assert difference(losses, 0) > GATE, "it is not the curve without delays"


def test_a_part_that_is_dropped_is_seen():
    with MUTANTS["part_forgotten"](), pytest.raises(ViolationError, match="has other bits"):
        curve(0, kills=0, steps=60)


def test_copies_of_a_tied_weight_that_drift_apart_are_seen():
    with MUTANTS["tied_apart"](), pytest.raises(ViolationError, match="tied parameter differ"):
        curve(0, kills=0, steps=20)
