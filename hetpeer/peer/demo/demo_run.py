"""Middle part of the demo: start all processes, watch the log, kill volunteers, see the run through."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetpeer.bootstrap.log.history import History, Record
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.log.record_text import record_text
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.base.runtime import Clock
from hetpeer.peer.demo.demo_settings import DemoSettings
from hetpeer.peer.demo.demo_view import DemoView, Picture
from hetpeer.peer.process.hetpeer_children import Child, end_all

RECENT = 10
"""Steps over which the present speed is taken."""
TRACE = ("--trace",)
LOOPBACK = ("--host", "127.0.0.1", "--port", "0")
POLL_S = 0.05
START_S = 90.0
"""Seconds until the reliable peer must answer: importing torch takes long on a busy machine."""
STALL_S = 150.0
"""Seconds without a committed step after which the demo gives up."""
LEAVE_S = 20.0
"""Seconds for volunteers to end after the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A record of the log and when it was seen, in monotonic seconds."""

    at: float
    record: Record


class LogFeed:
    """Follows a log that another process writes. `poll` often: a record's time is when it was first read."""

    def __init__(self, log: Path, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._size = 0
        self.seen: list[Seen] = []
        self.history = History()

    def poll(self) -> Sequence[Seen]:
        """Read the new records. Raises `LocalError` HP-LOG-001."""
        size = self._log.stat().st_size if self._log.exists() else 0
        if size == self._size:
            return ()
        self._size = size
        now = self._clock.monotonic()
        known = len(self.seen)
        fresh = [Seen(at=now, record=record) for record in read_log(self._log)][known:]
        for one in fresh:
            self.history.add(one.record)
        self.seen += fresh
        return fresh

    def step_seconds(self, last: int | None = None) -> float:
        """Median duration of the `last` committed steps (all without it); 0 before the first."""
        durations = [float(one.record["seconds"]) for one in self.seen if one.record["kind"] == "commit"]
        return statistics.median(durations[-last:] if last else durations) if durations else 0.0


def recovery_seconds(seen: Sequence[Seen], killed_at: float) -> float | None:
    """Seconds that the swarm lost by a kill at `killed_at`; None if it had not recovered by the end of the
    log.

    From the kill to the commit of the first step that *began* after it, less the median duration of the steps
    before the kill: such a step is planned without the dead volunteer, so its commit says that the swarm is
    whole again. A step begins when the one before it is committed, or at a roll-back. A swarm that notices
    nothing has between 0 and one step's duration, the rest of the step in which the kill fell.
    """
    usual = [float(s.record["seconds"]) for s in seen if s.record["kind"] == "commit" and s.at <= killed_at]
    began = False
    for one in seen:
        if one.at <= killed_at:
            continue
        if one.record["kind"] == "commit" and began:
            return max(0.0, one.at - killed_at - (statistics.median(usual) if usual else 0.0))
        began = began or one.record["kind"] in {"commit", "rollback"}
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A killed volunteer: after `step` committed steps, with the recovery of `log_feed.recovery_seconds`."""

    name: str
    step: int
    recovery_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A run that was seen through to its last step."""

    feed: LogFeed
    kills: Sequence[Kill]


async def train(settings: DemoSettings, run: RunDirectory, view: DemoView, clock: Clock) -> Trained:
    """Run the swarm until the run is finished. No process is left when this returns, raises or is cancelled.

    Raises `LocalError`: HP-DEMO-003 (a process failed), HP-DEMO-004 (nothing moves any more).
    """
    children: list[Child] = []
    try:
        arguments = ("bootstrap", str(run.path), *LOOPBACK)
        log = settings.logs / "bootstrap.log"
        bootstrap = await Child.start("bootstrap node", arguments, home=run.path, log=log)
        children.append(bootstrap)
        address = (await bootstrap.next_line(START_S)).split()[-1]
        view.say(f"reliable peer at {address}")
        for number in range(1, settings.peers + 1):
            children.append(await _volunteer(settings, number, address))  # noqa: PERF401 - one by one: none is missed at the end
        watch = _Watch(settings, run, view, clock, bootstrap, children[1:])
        await watch.until_finished()
        return Trained(feed=watch.feed, kills=watch.kills())
    finally:
        await end_all(children)


async def _volunteer(settings: DemoSettings, number: int, address: str) -> Child:
    name = f"volunteer-{number}"
    arguments = ("join", "--bootstrap", address, "--name", name, *LOOPBACK, *TRACE * settings.trace)
    return await Child.start(name, arguments, home=settings.home(number), log=settings.logs / f"{name}.log")


@dataclass(eq=False)
class _Watch:
    """Follows one run and carries out its kills."""

    _settings: DemoSettings
    _run: RunDirectory
    _view: DemoView
    _clock: Clock
    _bootstrap: Child
    _volunteers: Sequence[Child]
    _killed: dict[str, tuple[int, float]] = field(default_factory=dict)
    _mourned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.feed = LogFeed(self._run.log_path, self._clock)
        self._random = random.Random(self._settings.seed)  # noqa: S311 - the same victim for the same seed
        self._due = list(self._settings.kill_steps)
        self._moved_at = self._clock.monotonic()

    async def until_finished(self) -> None:
        """Return when the bootstrap node has ended after the last step and all volunteers have left."""
        while self._bootstrap.status is None:
            self._read_ledger()
            self._view.show(self._picture())
            await self._kill_when_due()
            self._check()
            await asyncio.sleep(POLL_S)
        self._read_ledger()
        self._view.show(self._picture())
        if self._bootstrap.status or self.feed.history.version < self._settings.steps:
            raise self._bootstrap.failure()
        for volunteer in self._alive():
            await volunteer.finished(LEAVE_S)
        self._notice_deaths()

    def kills(self) -> list[Kill]:
        """The kills and their recovery times."""
        return [
            Kill(name=name, step=step, recovery_seconds=recovery_seconds(self.feed.seen, at))
            for name, (step, at) in self._killed.items()
        ]

    def _read_ledger(self) -> None:
        for seen in self.feed.poll():
            if seen.record["kind"] == "commit":
                self._moved_at = seen.at
            elif seen.record["kind"] == "rollback":
                self._view.say(record_text(seen.record))

    async def _kill_when_due(self) -> None:
        """Kill a random volunteer that has contributed, each time the step of a kill is reached."""
        while self._due and self.feed.history.version >= self._due[0]:
            victims = [child for child in self._alive() if self._has_contributed(child)]
            if not victims:
                return
            self._due.pop(0)
            victim = self._random.choice(victims)
            step = self.feed.history.version
            self._killed[victim.name] = (step, self._clock.monotonic())
            await victim.kill()
            self._view.say(f"killed {victim.name} (kill -9) after {step} steps")

    def _check(self) -> None:
        """Raise when the run cannot go on."""
        self._notice_deaths()
        if self.feed.history.version == self._settings.steps:
            return
        if not self._alive():
            raise next(v for v in self._volunteers if v.name not in self._killed).failure()
        if self._clock.monotonic() - self._moved_at > STALL_S:
            raise LocalError(
                "HP-DEMO-004",
                f"no step was committed for {STALL_S:.0f} s",
                why=f"the last line of the reliable peer: {self._bootstrap.last_line()}",
                fix=f"read the files in {self._settings.logs}",
            )

    def _notice_deaths(self) -> None:
        """Show volunteers that have failed; others do their work, so the demo goes on."""
        for volunteer in self._volunteers:
            if volunteer.status and volunteer.name not in self._killed.keys() | self._mourned:
                self._mourned.add(volunteer.name)
                self._view.say(volunteer.failure().line())

    def _alive(self) -> list[Child]:
        return [volunteer for volunteer in self._volunteers if volunteer.status is None]

    def _has_contributed(self, volunteer: Child) -> bool:
        number = self._volunteers.index(volunteer) + 1
        events = self._settings.events_path(number, self._run.run_id)
        return events.exists() and events.stat().st_size > 0

    def _picture(self) -> Picture:
        history = self.feed.history
        last = history.commits.get(history.version - 1)
        duration = self.feed.step_seconds(RECENT)
        return Picture(
            step=history.version,
            steps=self._settings.steps,
            loss=None if last is None else float(last["loss"]),
            eval_loss=history.evaluations[max(history.evaluations)] if history.evaluations else None,
            tokens_per_second=self._settings.tokens_per_step / duration if duration else 0.0,
            rollbacks=history.rollbacks,
            volunteers=self._states(),
        )

    def _states(self) -> Mapping[str, str]:
        words = {None: "alive", 0: "done"}
        states = {volunteer.name: words.get(volunteer.status, "failed") for volunteer in self._volunteers}
        return states | dict.fromkeys(self._killed, "killed")
