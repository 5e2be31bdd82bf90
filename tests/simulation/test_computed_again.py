"""Histories with a real net in torch, through faults: computed again by one machine, each has equal bits.

Among them are nets that memorise and nets that diverge, whose curves on two machines are soon two curves.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetpeer.stages.pipeline.gradient_slots import GradientSlots
from tests.simulation.coverage import Coverage
from tests.simulation.histories import HistoryOutcome, shape, simulate
from tests.simulation.toy_net import SETTINGS, ToyNet

FEW, MANY = 8, 500
FIRST_SEED = 49_000
RATES = (3e-3, 3e-2, 0.3, 3.0)
"""Learning rates: the usual one, two that memorise or wander, and one that diverges."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(ToyNet):
    """A toy net one of whose gradients is changed by `change` after the run has computed it."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed, settings={**SETTINGS, "learning_rate": RATES[seed % len(RATES)]})
        self.wrong = ""
        self.computed = 0

    def backward(self, kept: Any, gradient: Any) -> tuple[Any, list[torch.Tensor]]:
        back, parts = super().backward(kept, gradient)
        self.computed += 1
        if self.computed == 40 and self.wrong == "bit":
            parts[0].view(torch.int32)[3] ^= 1 << 12  # of lower ones rounding may leave nothing in the sum
        if self.computed == 40 and self.wrong == "scale":
            parts[0].mul_(1.001)
        return back, parts


def history(seed: int, wrong: str = "") -> HistoryOutcome:
    net = Net(seed)
    net.wrong = wrong
    config = replace(shape(seed), ties=net.ties, clip_norm=0.5, arranged_s=0.0)
    return simulate(seed, Coverage(), faults=10, config=config, numerics=net)


def test_bits_are_equal() -> None:
    broken = [one for one in map(history, range(FIRST_SEED, FIRST_SEED + FEW)) if one.violation]
    assert not broken, broken


@pytest.mark.proof
@pytest.mark.timeout(3000)
def test_bits_are_equal_in_all_of_five_hundred_histories() -> None:
    outcomes = [history(seed) for seed in range(FIRST_SEED + FEW, FIRST_SEED + FEW + MANY)]
    broken = [one for one in outcomes if one.violation]
    assert not broken, broken
    assert sum(one.faults for one in outcomes) > 9 * MANY


@pytest.mark.parametrize("wrong", ["bit", "scale"])
def test_one_wrong_gradient_is_found(wrong: str) -> None:
    violation = history(FIRST_SEED, wrong).violation
    assert violation is not None
    assert "has other bits" in violation


def test_another_order_than_was_said_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = GradientSlots.seal

    def by_id(self: GradientSlots) -> tuple[int, dict[int, tuple[int, ...]]]:
        number, ids = seal(self)
        return number, {block: tuple(sorted(held)) for block, held in ids.items()}

    monkeypatch.setattr(GradientSlots, "seal", by_id)
    found = [history(seed).violation or "" for seed in range(FIRST_SEED, FIRST_SEED + FEW)]
    assert any("has other bits" in violation for violation in found)
