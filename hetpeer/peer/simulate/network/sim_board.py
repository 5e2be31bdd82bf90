"""The task board of a simulated swarm: notes that appear late, sometimes never, and stay for a while.

As in the DHT, nobody decides anything here: a note says who keeps inputs of which step for the holder of a block.
"""

from __future__ import annotations

import random

from hetpeer.averaging.effects import StepId
from hetpeer.peer.simulate.network.world import World

LOOK_S = 0.5
LATE_S, LOST = (0.05, 1.0), 0.1
TTL_S = 5.0


class Board:
    """Border → who has leftovers there, for which step."""

    def __init__(self, world: World, seed: int) -> None:
        self.random = random.Random(f"board {seed}")  # noqa: S311 - repeatable, not secret
        """Its own, so that histories without leftovers are what they would be without a board."""
        self._world = world
        self._notes: dict[tuple[int, str], tuple[StepId, float]] = {}

    def post(self, border: int, sender: str, step: StepId) -> None:
        """`sender` keeps bundles that enter block `border`; the note may be lost on its way."""
        if self.random.random() < LOST:
            return

        def appear() -> None:
            self._notes[border, sender] = step, self._world.now + TTL_S

        self._world.after(self.random.uniform(*LATE_S), appear)

    def read(self, blocks: range) -> list[tuple[str, StepId]]:
        """(sender, step) of the notes for any of `blocks`."""
        return [
            (sender, step)
            for (border, sender), (step, until) in self._notes.items()
            if border in blocks and until > self._world.now
        ]
