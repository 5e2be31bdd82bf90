"""A simulated swarm whose invariants are checked while it runs, and whose volunteers fail and lie as they are
told to.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import ClassVar

from hetpeer.bootstrap.state.effects import CoordinatorConfig
from hetpeer.peer.simulate.sim_numerics import Numerics
from hetpeer.peer.simulate.sim_swarm import SimSwarm
from hetpeer.peer.simulate.sim_volunteer import SimVolunteer
from tests.simulation.conduct import HistoryConduct
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.invariants import Checks


class CheckedSwarm(SimSwarm):
    """One history; `coverage` counts the cells of the state machines that it reaches."""

    config: HistoryConfig
    checks_class: ClassVar[type[Checks]] = Checks

    def __init__(self, seed: int, config: HistoryConfig, numerics: Numerics, coverage: Coverage) -> None:
        self.checks = self.checks_class(numerics, config, coverage)
        self.poison: dict[str, set[int]] = defaultdict(set)
        """Volunteer → marks of work that is to fail once (`SimConduct.computation_fails`)."""
        self.faults = 0
        self._draw = random.Random(seed).random
        super().__init__(seed, config, numerics, self.checks, self._conduct_of)

    def _core_config(self) -> CoordinatorConfig:
        return replace(super()._core_config(), checks=self.config.check_rules(self._draw))

    def _conduct_of(self, volunteer: SimVolunteer) -> HistoryConduct:
        name, config = volunteer.name, self.config
        return HistoryConduct(
            volunteer, config.told_by(name), self.poison[name], checks=config.check_share > 0
        )
