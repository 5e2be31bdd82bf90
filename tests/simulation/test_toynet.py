"""With real torch in the simulator: many kills, and the loss curve is still that of one process."""

import pytest
import torch

from hetpeer.bootstrap.history import History
from hetpeer.bootstrap.ledger import StepLedger
from hetpeer.peer.simulate.coverage import Coverage
from hetpeer.peer.simulate.faults import Kills
from hetpeer.peer.simulate.swarm import Swarm, SwarmConfig
from hetpeer.peer.simulate.toynet import ToyNet

STEPS, MICROBATCHES, KILLS, GATE = 40, 6, 20, 1e-6
UNEVEN = (((0, 1), (1, 4)), ((0, 3), (3, 4)), ((0, 2), (2, 4)))


def largest_difference(seed: int) -> float:
    """Of the committed losses from those of one process, relative."""
    torch.set_num_threads(1)
    net = ToyNet(4, seed)
    config = SwarmConfig(
        volunteers=6,
        layouts=UNEVEN,
        steps=STEPS,
        microbatches=MICROBATCHES,
        slot_capacity=2,
        checkpoint_every=5,
        clip_norm=0.5,
    )
    swarm = Swarm(seed, config, net, Coverage())
    Kills(swarm, KILLS, 3.0)
    swarm.run(2000.0)
    assert swarm.faults >= KILLS
    commits = History.of(swarm.log).commits
    alone = net.train_alone(STEPS, MICROBATCHES, config.clip_norm)
    assert alone[-1] < 0.9 * alone[0]
    return max(abs(commits[step]["loss"] - loss) / loss for step, loss in enumerate(alone))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_curve_is_that_of_one_process(seed: int) -> None:
    assert largest_difference(seed) <= GATE


def test_a_run_that_drops_an_id_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate is sound: one microbatch left out of each step shows."""
    real = StepLedger.__init__

    def forgetful(self: StepLedger, ids, *others) -> None:
        real(self, [i for i in ids if i != 0], *others)

    monkeypatch.setattr(StepLedger, "__init__", forgetful)
    monkeypatch.setattr("hetpeer.peer.simulate.checks.Checks.applied", lambda *_: None, raising=False)
    with pytest.raises(AssertionError):
        assert largest_difference(0) <= GATE
