"""A grouped run: clusters that train batches of their own, and average with those that are ready at about the same time.

Pure. Each cluster has a coordinator (cluster.py), whose volunteers work in it as in an exact run; here is what they have in common: the
door, the batches, who waits for a group (waiting.py), averagings (averagings.py) and founding. One log for all. Docs: averaging.md, "Grouped runs".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.groups.scheduler import GroupScheduler
from hetpeer.bootstrap.decisions import (
    CollectCheckpoint,
    CoordinatorConfig,
    Disconnect,
    Effect,
    Halt,
    Record,
    Send,
    State,
    Work,
)
from hetpeer.bootstrap.grouped.averagings import Averagings
from hetpeer.bootstrap.grouped.batches import Batches
from hetpeer.bootstrap.grouped.cluster import Cluster
from hetpeer.bootstrap.grouped.door import Door
from hetpeer.bootstrap.grouped.waiting import Waiting
from hetpeer.bootstrap.history import History
from hetpeer.bootstrap.membership import Membership, Volunteer
from hetpeer.bootstrap.reign import Reign

MUTE = "it did not vote on three plans"


class Grouped:
    """One reign over the run whose log says `records`. `scheduler` knows no worker yet."""

    def __init__(
        self,
        config: CoordinatorConfig,
        records: Iterable[Mapping[str, Any]],
        scheduler: GroupScheduler,
        now: float,
    ) -> None:
        self._config = config
        self._records: list[Mapping[str, Any]] = []
        self.batches = Batches(config.steps)
        self._waiting = Waiting(scheduler)
        self._averagings = Averagings(config.averaging_interval, delayed=config.averaging_delayed)
        self.clusters: dict[int, Cluster] = {}
        self.state = State.WAITING
        self._saver: int | None = None
        """Whose checkpoint is collected."""
        self._term = 0
        self._numbers = 0
        """How many clusters there have been. No number is used twice."""
        for record in records:
            self._fold(record)
        self._term += 1
        for cluster in sorted(self.batches.living):
            self._open(cluster, now, founded=True)
        self._door = Door(config, self._term, now)

    def _fold(self, record: Mapping[str, Any]) -> None:
        self._records.append(record)
        self.batches.add(record)
        self._averagings.add(record)
        match record["kind"]:
            case "reign":
                self._term = int(record["term"])
            case "founded":
                self._numbers = max(self._numbers, record["cluster"] + 1)
            case _:
                pass

    def start(self) -> list[Effect]:
        """The first effects of a reign: its term is durable before anything is said in its name."""
        return [self._log(kind="reign", term=self._term), *(self._complete() if self.over else [])]

    @property
    def over(self) -> bool:
        """Whether nothing is left to do: all batches are in, averaged, evaluated and stored."""
        return self._ending and self._evaluated and self._heir.history.stored

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, peer: str, message: m.Message, now: float) -> list[Effect]:
        """A message of `peer` (the transport's word, not the message's)."""
        if self.state is State.FINISHED and not isinstance(message, m.Hello):
            return []
        if isinstance(message, m.Hello):
            return self._settle(self._hello(peer, message, now), now)
        cluster = self._of(peer)
        if cluster is not None:
            return self._settle(self._to(cluster, peer, message, now), now)
        if peer not in self._door:
            return [
                Send(peer, m.Fenced(why="the coordinator does not know this volunteer")),
                Disconnect(peer),
            ]
        self._door.heard(peer, now)
        match message:
            case m.Claim():
                return self._settle(self._claim(peer, message), now)
            case m.Farewell():
                self._door.leave(peer)
                return [Disconnect(peer)]
            case _:
                return []

    def _to(self, cluster: Cluster, peer: str, message: m.Message, now: float) -> list[Effect]:
        """`cluster`'s volunteer says something to it, or of an averaging."""
        if not isinstance(message, m.Vote | m.Reducing | m.Objection) or not message.group:
            return self._by(cluster, cluster.receive(peer, message, now))
        one = self._averagings.of(cluster.number)
        if one is None or (message.line, message.group) != (cluster.line, one.number):
            return []
        cluster.resumed(peer, now)
        match message:
            case m.Vote():
                return one.vote(peer, message, now)
            case m.Reducing():
                one.reduce.moves(message, now)
            case m.Objection():
                for accused, why in one.reduce.accused(message, one.roster()).items():
                    other = self._of(accused)
                    return [] if other is None else self._by(other, other.silence([accused], why, now))
        return []

    def broken(self, peer: str, now: float) -> list[Effect]:
        """The stream of `peer` broke; it may come back within the grace."""
        cluster = self._of(peer)
        if cluster is not None:
            return cluster.broken(peer, now)
        self._door.broken(peer, now)
        return []

    def resumed(self, peer: str, now: float) -> list[Effect]:
        """The stream of `peer` is back and nothing was lost on the way."""
        cluster = self._of(peer)
        if cluster is not None:
            return cluster.resumed(peer, now)
        self._door.heard(peer, now)
        return []

    def saved(self, version: int, block: int, digest: str, now: float) -> list[Effect]:
        """The state of `block` at `version` of the cluster that saves lies durably in the checkpoint store."""
        saver = self.clusters.get(-1 if self._saver is None else self._saver)
        return (
            []
            if saver is None
            else self._settle(self._by(saver, saver.saved(version, block, digest, now)), now)
        )

    def not_saved(self, version: int, now: float) -> list[Effect]:
        """The checkpoint could not be collected: it is tried again at the next border."""
        saver = self.clusters.get(-1 if self._saver is None else self._saver)
        return [] if saver is None else saver.not_saved(version, now)

    def tick(self, now: float) -> list[Effect]:
        """Time passes. To be called a few times a second."""
        if self.state is State.FINISHED:
            return []
        effects = [*self._door.tick(now), *self._settle(self._silence(now), now)]
        for cluster in list(self.clusters.values()):
            effects += self._by(cluster, cluster.tick(now))
        effects = self._settle(effects, now)
        effects += self._averagings.tick(now)
        return effects + self._settle(self._form(self._waiting.tick(now), now), now)

    def _silence(self, now: float) -> list[Effect]:
        """Who does not vote on what it averages has to come back."""
        effects: list[Effect] = []
        for one in self._averagings.under_way():
            for peer in one.reduce.mute(one.roster(), now):
                cluster = self._of(peer)
                if cluster is not None:
                    effects += self._by(cluster, cluster.silence([peer], MUTE, now))
        return effects

    # ── what others show of it ───────────────────────────────────────────────────────────────────────────────────

    @property
    def volunteers(self) -> int:
        return sum(cluster.volunteers for cluster in self.clusters.values()) + len(self._door)

    def working(self) -> dict[str, m.Range]:
        return {peer: place for c in self.clusters.values() for peer, place in c.working().items()}

    @property
    def missing_blocks(self) -> Sequence[int]:
        """Blocks that no cluster has: none, as long as there is a whole one."""
        held = self.working().values()
        return [b for b in range(len(self._config.costs)) if not any(i <= b < j for i, j in held)]

    @property
    def done(self) -> int:
        return self.batches.known

    @property
    def last(self) -> list[Mapping[str, Any]]:
        histories = [cluster.history for cluster in self._living]
        return [h.commits[max(h.commits)] for h in histories if h.commits]

    # ── who is where ─────────────────────────────────────────────────────────────────────────────────────────────

    def _of(self, peer: str) -> Cluster | None:
        return next((c for c in self.clusters.values() if peer in c.members.volunteers), None)

    def _hello(self, peer: str, hello: m.Hello, now: float) -> list[Effect]:
        known = self._of(peer)
        refusal = self._door.refuse(peer, hello) or ([] if known is None else known.refuse(peer, hello))
        if refusal:
            return refusal
        effects = [] if known is None else self._by(known, known.dismiss(peer, now))
        if peer in self._door:
            self._door.leave(peer)
        back = self.clusters.get(hello.cluster)
        if back is not None and hello.place is not None and back.has_room(hello.place):
            return effects + self._by(back, back.receive(peer, hello, now))
        return effects + self._door.enter(Volunteer.of(peer, hello, now), self._places(now))

    def _claim(self, peer: str, claim: m.Claim) -> list[Effect]:
        cluster, volunteer = self.clusters.get(claim.cluster), self._door.leave(peer)
        if cluster is not None and cluster.enter(volunteer, claim):
            return [Send(peer, m.Granted(line=cluster.line, begin=claim.begin, end=claim.end))]
        return self._door.enter(volunteer, self._places(volunteer.heard_at))

    def _places(self, now: float) -> list[m.Place]:
        """All places of clusters that are not full; if there is no open one, those of a new cluster."""
        places = [place for cluster in self.clusters.values() for place in cluster.members.places()]
        if not any(place.open for place in places):
            places += self._open(self._numbers, now, founded=False).members.places()
        return places

    def _open(self, number: int, now: float, *, founded: bool) -> Cluster:
        config, history = self._config, History.of(self._records, number)
        members = Membership(config.layouts, config.costs, history.departures, only=number)
        line = m.Line(term=self._term, view=0, cluster=number)
        reign = Reign(config, history, _Share(self, number), line, members)
        self._numbers = max(self._numbers, number + 1)
        self.clusters[number] = Cluster(reign, now, founded=founded)
        return self.clusters[number]

    # ── what follows ─────────────────────────────────────────────────────────────────────────────────────────────

    def _log(self, **record: Any) -> Record:
        """Of all clusters together."""
        self._fold(record)
        for cluster in self.clusters.values():
            cluster.history.add(record)
        return Record(record)

    def _by(self, cluster: Cluster, effects: list[Effect]) -> list[Effect]:
        """What `cluster` decides concerns the others, too."""
        for effect in effects:
            match effect:
                case CollectCheckpoint():
                    self._saver = cluster.number
                case Halt(why, completed):
                    return [*effects, *self._close(m.Finished(why=why, completed=completed), but=cluster)]
                case _:
                    pass
        return effects

    def _settle(self, effects: list[Effect], now: float) -> list[Effect]:
        """All that can be done at once is done."""
        done = list(effects)
        while self.state is not State.FINISHED:
            more = (
                self._bury(now)
                or self._decide(now)
                or self._install(now)
                or self._found(now)
                or self._line_up(now)
                or self._finish(now)
            )
            if not more:
                break
            done += more
        return done

    def _bury(self, now: float) -> list[Effect]:
        """Clusters have fallen apart: the others go on without them, their volunteers choose again."""
        fallen = [c for c in self.clusters.values() if c.dissolved is not None]
        effects: list[Effect] = []
        for cluster in fallen:
            del self.clusters[cluster.number]
            effects.append(self._log(kind="dissolved", cluster=cluster.number, why=cluster.dissolved))
        numbers = {cluster.number for cluster in fallen}
        effects += self._averagings.without(numbers, now)
        self._saver = None if self._saver in numbers else self._saver
        for cluster in fallen:
            for volunteer in cluster.members.volunteers.values():
                effects += self._door.enter(volunteer.homeless(), self._places(now))
        return effects + self._form(self._waiting.leave(numbers, now), now)

    def _decide(self, now: float) -> list[Effect]:
        """An averaging is decided, or cannot be."""
        for one in self._averagings.under_way():
            if one.reduce.trouble is not None:
                why = f"{one.reduce.trouble} in group {one.number}"
                return [self._log(kind="halt", why=why), *self._close(m.Finished(why=why, completed=False))]
        record = self._averagings.decided(now)
        clusters = () if record is None else [number for number, _ in record["clusters"]]
        return [] if record is None else self._log_average(record, "average", clusters, now)

    def _install(self, now: float) -> list[Effect]:
        """A cluster has come to stand between two steps, and a mean is decided for it."""
        for number, record in self._averagings.promised().items():
            if self.clusters[number].at_rest:
                return self._log_average(record, "installed", (number,), now)
        return []

    def _log_average(
        self, record: Mapping[str, Any], kind: str, clusters: Iterable[int], now: float
    ) -> list[Effect]:
        """Those of `clusters` that can install it at once do."""
        ready = [self.clusters[number] for number in clusters if self.clusters[number].at_rest]
        steps = [(cluster.number, cluster.history.version) for cluster in ready]
        effects: list[Effect] = [self._log(kind=kind, **record, installed=steps)]
        for cluster in ready:
            effects += self._by(cluster, cluster.installs(record, now))
        return effects

    def _found(self, now: float) -> list[Effect]:
        """A cluster has all its volunteers: it begins from the last checkpoint, if that is as new as can be."""
        forming = next((c for c in self.clusters.values() if not c.founded and c.complete), None)
        living = self._living
        if forming is None or (living and self.batches.exhausted):
            return []
        if living and (self.batches.unsaved or not self.batches.compatible):
            return []  # one of them is asked to store what it has
        version = forming.history.checkpoint_version
        record = self._log(kind="founded", cluster=forming.number, version=version)
        return [record, *self._by(forming, forming.found(now))]

    def _line_up(self, now: float) -> list[Effect]:
        """Who has trained its batches waits for a group."""
        if self.batches.exhausted:
            return []
        for number, cluster in self.clusters.items():
            if cluster.whole and not self._waiting.knows(number):
                base = (cluster.history.base or {}).get("cluster")
                return self._form(self._waiting.join(number, base, now), now) or self._line_up(now)
            if self._is_ready(cluster) and not self._waiting.waits(number):
                return self._form(self._waiting.line_up(number, now), now) or self._line_up(now)
        return []

    def _is_ready(self, cluster: Cluster) -> bool:
        """Whether it has trained its batches since it joined a group, and is to join one."""
        due = self._averagings.due(cluster.number, cluster.history.version)
        return due and not self._averagings.busy(cluster.number) and cluster.whole and cluster.at_rest

    def _form(self, groups: Iterable[Sequence[int]], now: float) -> list[Effect]:
        """These average with each other; who has fallen apart meanwhile does not."""
        effects: list[Effect] = []
        for group in groups:
            effects += self._average([self.clusters[c] for c in group if c in self.clusters], now)
        return effects

    def _average(self, members: Sequence[Cluster], now: float, *, last: bool = False) -> list[Effect]:
        effects: list[Effect] = []
        if len(members) > 1:
            effects += self._averagings.begin({c.number: c.reign for c in members}, now, last=last)
        for alone in members if len(members) == 1 else ():
            self._averagings.skip(alone.number, alone.history.version)
        for cluster in members:
            if not self._averagings.stops(cluster.number):
                effects += self._by(cluster, cluster.go_on(now))
        return effects

    # ── what clusters ask ────────────────────────────────────────────────────────────────────────────────────────

    def take(self, number: int, ahead: int) -> Work | None:
        """What `number` does next, beside `ahead` steps under way."""
        cluster = self.clusters[number]
        if self._averagings.stops(number):
            return None
        if self._ending:
            evaluates = cluster is self._heir and not self._evaluated and not ahead
            return Work(self._config.steps, trains=False, evaluates=True) if evaluates else None
        if self._averagings.due(number, cluster.history.version + ahead):
            return None
        batch = self.batches.take(number)
        due = batch is not None and self._evaluates(batch)
        if batch is not None and due and ahead:
            self.batches.hand_back(number, batch)
            return None
        averages = cluster.history.averages
        last = len(averages[max(averages)]["clusters"]) if averages else 1
        workers = last if self._config.corrected else 1
        return None if batch is None else Work(batch, evaluates=due, workers=workers)

    def _evaluates(self, batch: int) -> bool:
        config = self._config
        return config.evaluation_microbatches > 0 and batch % config.evaluate_every == 0

    def saves(self, number: int) -> bool:
        """Whether `number` is to store its parameters now. Not while others fetch the last ones that were stored."""
        clusters = self.clusters.values()
        if self._saver not in (None, number) or any(c.founded and not c.whole for c in clusters):
            return False
        if self._ending:
            return number == self._heir.number
        wanted = any(not c.founded and c.complete for c in clusters)
        return self.batches.unsaved >= (1 if wanted else self._config.checkpoint_every)

    def logged(self, number: int, record: Mapping[str, Any]) -> None:
        """`number` has written `record`: all know it before anybody decides what follows."""
        self._fold(record)
        for other in self.clusters.values():
            if other.number != number:
                other.history.add(record)
        if record["kind"] == "checkpoint":
            self._saver = None

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _living(self) -> list[Cluster]:
        return [cluster for cluster in self.clusters.values() if cluster.founded]

    @property
    def _agreed(self) -> bool:
        """Whether all clusters have the same parameters, by a last averaging of all of them."""
        living = self._living
        last = {c.number: c.history.version - 1 for c in living}
        records = [c.history.averages.get(c.history.version - 1, {}) for c in living]
        return len(living) == 1 or all(dict(one.get("clusters", ())) == last for one in records)

    @property
    def _ending(self) -> bool:
        """Whether only the last evaluation and the last checkpoint are left to do, by the heir."""
        return self.batches.exhausted and bool(self._living) and self._agreed

    @property
    def _heir(self) -> Cluster:
        return min(self._living, key=lambda cluster: cluster.number)

    @property
    def _evaluated(self) -> bool:
        history = self._heir.history
        return not self._config.evaluation_microbatches or history.version in history.evaluations

    def _finish(self, now: float) -> list[Effect]:
        """All batches are in: everybody averages with everybody, one evaluates and stores what has become of it."""
        living = self._living
        if not (self.batches.exhausted and living and all(c.whole and c.at_rest for c in living)) or any(
            self._averagings.busy(c.number) for c in living
        ):
            return []
        if not self._agreed:
            self._waiting.close(now)
            return self._average(living, now, last=True)
        heir = self._heir
        if self.over:
            return self._complete()
        return self._by(heir, heir.go_on(now))

    def _complete(self) -> list[Effect]:
        return self._close(m.Finished(why=f"all {self._config.steps} batches are committed", completed=True))

    def _close(self, end: m.Finished, but: Cluster | None = None) -> list[Effect]:
        self.state = State.FINISHED
        told: list[Effect] = [
            Send(peer, end) for c in self.clusters.values() if c is not but for peer in c.members.volunteers
        ]
        halt: list[Effect] = [Halt(end.why, end.completed)] if but is None else []
        return [*told, *self._door.close(end), *halt]


class _Share:
    """The agenda of one cluster: its part of the run."""

    over = False

    def __init__(self, run: Grouped, number: int) -> None:
        self._run = run
        self._number = number

    def take(self, ahead: int = 0) -> Work | None:
        return self._run.take(self._number, ahead)

    def saves(self, version: int) -> bool:  # noqa: ARG002 - whatever its version
        return self._run.saves(self._number)

    def logged(self, record: Mapping[str, Any]) -> None:
        self._run.logged(self._number, record)
