"""Process of a simulated coordinator: one life of the real core after another, each from the log."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hetpeer.bootstrap.service.core_interface import Core
from hetpeer.bootstrap.state.effects import Effect
from hetpeer.peer.simulate.network.world import Gate, World
from hetpeer.peer.simulate.sim_hooks import SimObserver

TICK_S = 0.25


@dataclass(eq=False)
class SimCoordinator:
    """Runs the core that `new_core` makes, and gives its effects to `carry_out`."""

    _world: World
    _observer: SimObserver
    _new_core: Callable[[], Core]
    _carry_out: Callable[[Effect], None]
    core: Core | None = None
    """None while the coordinator is down."""
    life: int = 0
    _due: float = math.inf
    """Time at which the core is called before its next regular tick."""

    def __post_init__(self) -> None:
        self._gate = Gate(self._world)

    def start(self) -> None:
        """Start a process: a new life, and with it a new term."""
        self.life += 1
        self.core = self._new_core()
        self._perform(self.core.start())
        self._tick(self.life)

    def crash(self) -> None:
        """Kill the process (SIGKILL); events that wait for it are lost."""
        self.core = None
        self._gate.open()

    def pause(self, seconds: float) -> None:
        """Stop the process (SIGSTOP): events wait, while time-outs pass."""
        self._gate.close(seconds)

    def later(self, action: Callable[[], None]) -> None:
        """Carry out `action` at once, or when the stopped process goes on."""
        self._gate.enter(action)

    def event(self, name: str, act: Callable[[Core, float], Iterable[Effect]]) -> None:
        """Give event `name` to the core by `act`; nothing happens while the coordinator is down."""
        if self.core is not None:
            self._observer.coordinator_event(self.core.state.value, name)
            self._perform(act(self.core, self._world.now))
            self._wake_when_due()

    def _wake_when_due(self) -> None:
        """As the product's alarm: call the core at the time that it names (`due_at`)."""
        due = math.inf if self.core is None else self.core.due_at
        if due == self._due:
            return
        self._due, wait, life = due, due - self._world.now, self.life

        def ring() -> None:
            if self.core is not None and life == self.life and due == self._due:
                self._due = math.inf
                self.event("tick", lambda core, now: core.tick(now))

        if 0 < wait < math.inf:
            self._world.after(wait, lambda: self._gate.enter(ring))

    def _tick(self, life: int) -> None:
        def tick() -> None:
            if self.core is not None and life == self.life:
                self.event("tick", lambda core, now: core.tick(now))
                self._world.after(TICK_S, lambda: self._tick(life))

        self._gate.enter(tick)

    def _perform(self, effects: Iterable[Effect]) -> None:
        """Carry out effects in order; a fault may crash the process between two of them."""
        life = self.life
        for effect in effects:
            if self.core is None or life != self.life:
                return
            self._carry_out(effect)
