"""Seeded faults: at random times, and at protocol phases where a bug would hide.

Random times alone miss short windows (between vote and commit, between the log record and its announcement), so half
of the faults wait for a named moment and strike within it.
"""

from __future__ import annotations

from collections.abc import Callable

from hetpeer.peer.simulate.swarm import Swarm
from hetpeer.peer.simulate.volunteer import Volunteer

MOMENTS = (
    "tell sealed",
    "tell vote",
    "tell applied",
    "tell evaluated",
    "tell ready",
    "record commit",
    "record checkpoint",
    "record reign",
    "record gone",
)


class Faults:
    """Injects about `count` faults during the first `span_s` virtual seconds of `swarm`."""

    def __init__(self, swarm: Swarm, count: int, span_s: float) -> None:
        self._swarm = swarm
        world = swarm.world
        for _ in range(count):
            if world.random.random() < 0.5:
                world.after(world.random.uniform(1.0, span_s), self._strike)
            else:
                self._lie_in_wait(world.random.choice(MOMENTS), world.random.randrange(1, 30))

    def _lie_in_wait(self, moment: str, occurrence: int) -> None:
        """Strike at the `occurrence`-th time that `moment` happens, within a hundredth of a second."""
        seen = 0

        def hook(what: str) -> None:
            nonlocal seen
            if what != moment:
                return
            seen += 1
            if seen == occurrence:
                self._swarm.hooks.remove(hook)
                if what.startswith("record") and self._swarm.world.random.random() < 0.5:
                    self._swarm.faults += 1
                    self._swarm.crash_coordinator(self._swarm.world.random.uniform(0.5, 4.0))
                else:
                    self._swarm.world.after(self._swarm.world.random.uniform(0.0, 0.01), self._strike)

        self._swarm.hooks.append(hook)

    def _strike(self) -> None:
        swarm, random = self._swarm, self._swarm.world.random
        if swarm.completed is not None:
            return
        victim = random.choice([v for v in swarm.volunteers.values() if v.alive] or [None])
        strikes: list[tuple[float, Callable[[Volunteer], None]]] = [
            (4, self._kill),
            (2, self._freeze),
            (3, self._cut),
            (2, self._cut_from_coordinator),
            (1, self._poison),
        ]
        swarm.faults += 1
        if victim is None or random.random() < 0.1:
            swarm.crash_coordinator(random.uniform(0.5, 20.0))
            return
        strike = random.choices([s for _, s in strikes], [w for w, _ in strikes])[0]
        strike(victim)

    def _kill(self, victim: Volunteer) -> None:
        victim.kill()
        self._swarm.world.after(self._swarm.world.random.choice((0.5, 3.0, 15.0)), victim.start)

    def _freeze(self, victim: Volunteer) -> None:
        victim.freeze(self._swarm.world.random.choice((0.5, 5.0, 14.0)))

    def _cut(self, victim: Volunteer) -> None:
        """A link is away for a while; after the longer cuts both ends have given each other up."""
        swarm, random = self._swarm, self._swarm.world.random
        other = random.choice(list(swarm.volunteers.values()))
        seconds = random.choice((0.3, 2.0, 6.0))
        swarm.network.cut(victim.name, other.name, seconds)
        if seconds > 1.0 and other is not victim:
            for here, there in ((victim, other), (other, victim)):
                swarm.world.after(1.0, here.link_down(there.name))
                swarm.world.after(seconds, here.link_up(there.name))

    def _cut_from_coordinator(self, victim: Volunteer) -> None:
        swarm = self._swarm
        seconds = swarm.world.random.choice((0.5, 1.5, 8.0))
        swarm.network.cut(victim.name, "coordinator", seconds)
        if swarm.coordinator is not None:
            swarm.coordinator.broken(victim.name, swarm.world.now)

    def _poison(self, victim: Volunteer) -> None:
        swarm = self._swarm
        swarm.poison.add((victim.name, swarm.world.random.randrange(swarm.config.microbatches)))
