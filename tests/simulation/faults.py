"""Seeded faults: at random times, and at moments of the protocol where a bug would hide.

Random times alone miss short windows (between vote and commit, between the log record and its announcement),
so half of the faults wait for a named moment and strike within a hundredth of a second of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Effect
from hetpeer.averaging.member.member import Member
from hetpeer.peer.simulate.sim_swarm import COORDINATOR
from hetpeer.peer.simulate.sim_volunteer import SimVolunteer
from tests.simulation.checked_swarm import CheckedSwarm

MOMENTS = (
    "tell hello",
    "tell claim",
    "tell prepared",
    "tell ready",
    "tell sealed",
    "tell evaluated",
    "tell failed",
    "tell vote",
    "tell applied",
    "record commit",
    "record checkpoint",
    "record reign",
    "record gone",
    "record rollback",
)
OF_CLUSTERS = ("record average", "record installed", "record dissolved", "record founded")

STRIKE_AFTER_S = 8.0


class Faults:
    """Injects `count` faults into `swarm`, some of them at once, from its first seconds on.

    `failing`: share of the faults that are failing work (besides those that are so by chance).
    """

    def __init__(
        self, swarm: CheckedSwarm, count: int, moments: Sequence[str] = MOMENTS, failing: float = 0.0
    ) -> None:
        self._swarm = swarm
        self._moments = moments
        self._failing = failing
        self._random = swarm.world.random
        self._wholesome = list(range(2 * swarm.config.microbatches))
        """Work that has not been made to fail yet (conduct.py): at most one forward and one backward of an
        id.
        """
        self._random.shuffle(self._wholesome)
        at = 0.0
        for _ in range(count):
            at += self._random.choice((0.0, self._random.uniform(0.2, 2.5)))
            strike = self._strike if self._random.random() < 0.5 else self._lie_in_wait
            swarm.world.after(at, strike)

    def _lie_in_wait(self) -> None:
        """Strike when a moment of some kind comes for the n-th time, or after STRIKE_AFTER_S."""
        swarm, random = self._swarm, self._random
        moment, left = random.choice(self._moments), random.randrange(1, 12)
        left = 1 + left % 2 if moment in OF_CLUSTERS else left  # they are rare

        def hook(what: str) -> None:
            nonlocal left
            left -= what == moment
            if left == 0:
                swarm.hooks.remove(hook)
                if what.startswith("record") and random.random() < 0.5:
                    swarm.faults += 1
                    swarm.crash_coordinator(random.uniform(0.5, 4.0))
                else:
                    swarm.world.after(random.uniform(0.0, 0.01), self._strike)

        def give_up() -> None:
            if hook in swarm.hooks:
                swarm.hooks.remove(hook)
                self._strike()

        swarm.hooks.append(hook)
        swarm.world.after(STRIKE_AFTER_S, give_up)

    def _strike(self) -> None:
        swarm, random = self._swarm, self._random
        if swarm.completed is not None:
            return
        swarm.faults += 1
        alive = [v for v in swarm.volunteers.values() if v.alive]
        if alive and self._failing and random.random() < self._failing:
            self._poison(random.choice(alive))
            return
        if not alive or random.random() < 0.2:
            self._strike_coordinator()
            return
        strikes: list[tuple[float, Callable[[SimVolunteer], None]]] = [
            (4, self._kill),
            (2, self._freeze),
            (3, self._cut),
            (2, self._cut_from_coordinator),
            (2, self._poison),
            (1, self._leave),
            (1, self._hang),
            (1, self._slow_down),
            (1, self._mistake),
            (1, self._shun),
        ]
        random.choices([s for _, s in strikes], [w for w, _ in strikes])[0](random.choice(alive))

    def _strike_coordinator(self) -> None:
        swarm, random = self._swarm, self._random
        match random.randrange(6):
            case 0 | 1:
                swarm.crash_coordinator(random.uniform(0.5, 20.0))
            case 2:
                swarm.host.pause(random.choice((1.0, 5.0, 15.0)))
            case 3:
                swarm.store.fail()
            case 4:
                swarm.stranger(m.Hello(run="another run", incarnation=1))
            case 5:
                swarm.stranger(m.Hello(run="sim", incarnation=1, wire_version=m.WIRE_VERSION + 1))

    def _kill(self, victim: SimVolunteer) -> None:
        victim.kill()
        self._swarm.world.after(self._random.choice((0.5, 3.0, 15.0)), victim.start)

    def _freeze(self, victim: SimVolunteer) -> None:
        victim.freeze(self._random.choice((0.5, 5.0, 14.0, 30.0)))

    def _cut(self, victim: SimVolunteer) -> None:
        """Cut a link for a while; after a longer cut both ends have given each other up."""
        swarm = self._swarm
        other = self._random.choice(list(swarm.volunteers.values()))
        seconds = self._random.choice((0.3, 2.0, 6.0))
        swarm.network.cut(victim.name, other.name, seconds)
        if seconds > 1.0 and other is not victim:
            for here, there in ((victim, other), (other, victim)):
                swarm.world.after(1.0, partial(here.link_lost, there.name))
                swarm.world.after(seconds, partial(_link_up, here, there.name))

    def _shun(self, victim: SimVolunteer) -> None:
        """Let a volunteer refuse another one for a while; that one only sees that its link is down."""
        swarm = self._swarm
        other = self._random.choice([v for v in swarm.volunteers.values() if v is not victim] or [victim])
        seconds = self._random.choice((2.0, 20.0))
        swarm.network.cut(victim.name, other.name, seconds)
        _refuse(victim, other.name, for_now=True)
        swarm.world.after(1.0, partial(other.link_lost, victim.name))
        swarm.world.after(seconds, partial(_refuse, victim, other.name, for_now=False))
        swarm.world.after(seconds, partial(_link_up, other, victim.name))

    def _cut_from_coordinator(self, victim: SimVolunteer) -> None:
        swarm, name = self._swarm, victim.name
        seconds = self._random.choice((0.5, 1.5, 8.0))
        swarm.network.cut(name, COORDINATOR, seconds)
        swarm.stream_broken(name)
        swarm.world.after(seconds, lambda: swarm.stream_resumed(name))

    def _poison(self, victim: SimVolunteer) -> None:
        """Let a forward or backward of this volunteer fail, no id so often that the run must halt; or spoil
        its next part.
        """
        work = self._wholesome.pop() if self._wholesome else 0
        if work % 3:
            self._swarm.poison[victim.name].add(work)
        else:
            victim.conduct.spoils = 1

    def _leave(self, victim: SimVolunteer) -> None:
        self._swarm.tell(victim, m.Farewell())
        self._swarm.world.after(0.3, lambda: self._kill(victim))

    def _hang(self, victim: SimVolunteer) -> None:
        """Stop the worker for a while; the daemon goes on."""
        victim.worker.hang(self._random.choice((3.0, 12.0, 30.0)))

    def _mistake(self, victim: SimVolunteer) -> None:
        """Restart it for another run, and then again for this one."""
        victim.kill()
        self._swarm.world.after(1.0, lambda: victim.start("another run"))
        self._swarm.world.after(4.0, victim.kill)
        self._swarm.world.after(5.0, victim.start)

    def _slow_down(self, victim: SimVolunteer) -> None:
        """Slow down its fetches so much that a step barrier does not wait for them."""
        victim.fetch_s = (2.0, 14.0)
        self._swarm.world.after(60.0, lambda: setattr(victim, "fetch_s", self._swarm.config.fetch_s))


class Kills:
    """Kills `count` volunteers, one every `interval_s` virtual seconds or so; each comes back soon."""

    def __init__(self, swarm: CheckedSwarm, count: int, interval_s: float) -> None:
        random = swarm.world.random

        def strike() -> None:
            alive = [v for v in swarm.volunteers.values() if v.alive]
            if alive and swarm.completed is None:
                victim = random.choice(alive)
                victim.kill()
                swarm.faults += 1
                swarm.world.after(random.uniform(0.5, 3.0), victim.start)

        for number in range(1, count + 1):
            swarm.world.after((number + random.random()) * interval_s, strike)


def _link_up(volunteer: SimVolunteer, peer: str) -> None:
    """Tell the core of `volunteer` that the link to `peer` is up."""

    def up(core: Member) -> Iterable[Effect]:
        core.work.reachable(peer)
        return ()

    volunteer.later(volunteer.process, up)


def _refuse(volunteer: SimVolunteer, peer: str, *, for_now: bool) -> None:
    """Tell the core of `volunteer` to stop working with `peer` for now, or to go on."""
    volunteer.later(volunteer.process, lambda core: core.work.refused(peer, for_now))
