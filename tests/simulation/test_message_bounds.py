"""Honest volunteers say nothing that a coordinator would refuse for its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from tests.simulation.coverage import Coverage
from tests.simulation.histories import shape, simulate


@pytest.mark.parametrize("seed", [3, 12])
def test_every_message_of_a_history_is_within_the_bounds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With deaths and returns; each as bytes, as the service reads it."""
    said: list[str] = []
    receive, slot = Coordinator.receive, shape(seed).slot_capacity

    def reads(self: Coordinator, peer: str, message: m.Message, now: float) -> Sequence[Any]:
        config = self._context.config
        microbatches = len(config.sizes) + config.evaluation_microbatches
        bounds = m.MessageBounds(
            blocks=len(config.costs), microbatches=microbatches, slot=slot, checked=False
        )
        data = m.encode(message)
        if isinstance(message, m.Hello):
            m.decode_hello(data, bounds)
        else:
            m.decode_from_volunteer(data, bounds, self.volunteers)
        said.append(message.kind)
        return receive(self, peer, message, now)

    monkeypatch.setattr(Coordinator, "receive", reads)
    assert simulate(seed, Coverage(), faults=10).violation is None
    assert {"hello", "sealed", "vote", "applied", "ready"} <= set(said)
