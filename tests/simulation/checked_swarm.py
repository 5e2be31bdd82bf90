"""A simulated swarm whose invariants are checked while it runs, and whose volunteers fail and lie as they are
told to.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.grouped.formation import Formation
from hetpeer.bootstrap.grouped.grouped_run import GroupedRun
from hetpeer.bootstrap.grouped.recut import Recut
from hetpeer.bootstrap.service.core_interface import Core
from hetpeer.bootstrap.state import effects as d
from hetpeer.bootstrap.state.effects import CoordinatorConfig
from hetpeer.peer.simulate.sim_swarm import SimSwarm
from hetpeer.peer.simulate.sim_volunteer import SimVolunteer
from tests.simulation.checked_symbols import CheckedNumerics
from tests.simulation.checked_volunteer import CheckedVolunteer
from tests.simulation.conduct import HistoryConduct
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.granted_links import GrantedLink
from tests.simulation.invariants import Checks, require


class CheckedSwarm(SimSwarm):
    """One history; `coverage` counts the cells of the state machines that it reaches."""

    config: HistoryConfig
    checks_class: ClassVar[type[Checks]] = Checks
    volunteer_class = CheckedVolunteer

    def __init__(
        self, seed: int, config: HistoryConfig, numerics: CheckedNumerics, coverage: Coverage
    ) -> None:
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

    def run(self, limit_s: float) -> None:
        super().run(limit_s)
        last = self.store.last()
        for tie in self.config.ties:
            shared = {self.numerics.shared(last[block], begin, end) for block, begin, end in tie.uses}
            require(len(shared) == 1, "the copies of a tied parameter differ")

    def open_link(self, sender: SimVolunteer, receiver: SimVolunteer) -> GrantedLink | None:
        frames = self.config.granted_frames
        return GrantedLink(sender, receiver, frames) if frames else None

    # ── faults and proposals ────────────────────────────────────────────────────────────────────────────────

    def crash_coordinator(self, away_s: float, found_s: tuple[float, float] = (0.1, 2.0)) -> None:
        """Kill the coordinator for `away_s` seconds; its log stays.

        Each volunteer finds it again after a time between the two of `found_s`.
        """
        if self.coordinator is None:
            return
        self.host.crash()
        sessions, self._channels = self._channels, {}
        self.world.after(away_s, self.start_coordinator)
        for name, session in sessions.items():
            back = away_s + self.world.random.uniform(*found_s)
            self.world.after(back, self.volunteers[name].lost_session(session))

    def arrange(self, arrangement: Arrangement) -> None:
        """Propose places for volunteers, as a planner does."""

        def proposed(core: Core, now: float) -> Iterable[d.Effect]:
            assert isinstance(core, Coordinator)
            return core.arrange(arrangement, now)

        self.host.later(lambda: self.host.event("arrange", proposed))

    def form(self, formation: Formation) -> None:
        """Propose clusters for the volunteers that wait, as a planner does."""

        def proposed(core: Core, now: float) -> Iterable[d.Effect]:
            return core.form(formation, now) if isinstance(core, GroupedRun) else ()

        self.host.later(lambda: self.host.event("form", proposed))

    def recut(self, recut: Recut) -> None:
        """Propose to divide living clusters anew, as a planner does."""

        def proposed(core: Core, now: float) -> Iterable[d.Effect]:
            return core.recut(recut, now) if isinstance(core, GroupedRun) else ()

        self.host.later(lambda: self.host.event("recut", proposed))

    def stranger(self, message: m.Message) -> None:
        """Send a message to the coordinator from a peer that is no volunteer of this run."""
        self.host.later(
            lambda: self.host.event(message.kind, lambda core, now: core.receive("stranger", message, now))
        )
