"""Consequences for all clusters of what has happened in one of them.

Pure. Clusters that have fallen apart are removed, averagings are decided and installed, clusters are founded,
queue up and average, and at the end the run is closed. This module alone sets the state of a grouped run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.grouped.averagings import Averagings
from hetpeer.bootstrap.grouped.cluster import Cluster
from hetpeer.bootstrap.grouped.cluster_agenda import ClusterAgendas, GroupQueue
from hetpeer.bootstrap.grouped.cluster_list import Clusters, UnassignedVolunteers
from hetpeer.bootstrap.grouped.formation import Formation
from hetpeer.bootstrap.grouped.recut import WHY, Recut
from hetpeer.bootstrap.grouped.spares import Spares
from hetpeer.bootstrap.grouped.unfounded_clusters import UnfoundedClusters
from hetpeer.bootstrap.log.rosters import held_in_averaging
from hetpeer.bootstrap.state.effects import (
    CollectCheckpoint,
    CoordinatorConfig,
    CoordinatorState,
    Effect,
    Halt,
    Send,
)

FOUNDING_S = 900.0
"""Sparse averagings are put off for a cluster that is to be founded for so many seconds at most."""


class ClusterEvents:
    """The clusters and unassigned volunteers of one term, and what they lead to."""

    def __init__(
        self,
        config: CoordinatorConfig,
        clusters: Clusters,
        agendas: ClusterAgendas,
        averagings: Averagings,
        queue: GroupQueue,
        unassigned: UnassignedVolunteers,
        unfounded: UnfoundedClusters,
    ) -> None:
        self._config = config
        self._clusters = clusters
        self._agendas = agendas
        self._averagings = averagings
        self._queue = queue
        self._unassigned = unassigned
        self._unfounded = unfounded
        self._spares = Spares(config.spare_s, clusters, agendas, unassigned)
        self._put_off_since: float | None = None
        """Since when averagings are put off; None: they are not."""
        self._arrived: set[int] = set()
        """Clusters that have been whole in this term."""
        self.state = CoordinatorState.WAITING

    def by(self, cluster: Cluster, effects: list[Effect]) -> list[Effect]:
        """Note the effects of `cluster` that concern the others too, and return them with what follows."""
        for effect in effects:
            match effect:
                case CollectCheckpoint():
                    self._clusters.saver = cluster
                case Halt(why, completed):
                    return [*effects, *self._close(m.Finished(why=why, completed=completed), but=cluster)]
                case _:
                    pass
        return effects

    def settle(self, effects: list[Effect], now: float) -> list[Effect]:
        """Do all that can be done at once, after `effects`."""
        done = list(effects)
        while self.state is not CoordinatorState.FINISHED:
            more = (
                self._remove_dissolved(now)
                or self._begin_anew(now)
                or self._leave_line(now)
                or self._decide(now)
                or self._install(now)
                or self._recut(now)
                or self._cover(now)
                or self._found(now)
                or self._line_up(now)
                or self._finish(now)
            )
            if not more:
                break
            done += more
        return done

    @property
    def due_at(self) -> float:
        """Time of the next `tick` that is not to be late; infinite or past if there is none."""
        return math.inf if self.state is CoordinatorState.FINISHED else self._queue.due_at

    def tick(self, now: float) -> list[Effect]:
        """Form groups of clusters that have waited long enough."""
        return self.settle(self._form(self._queue.tick(now), now), now)

    # ── clusters come and go ────────────────────────────────────────────────────────────────────────────────

    def _remove_dissolved(self, now: float) -> list[Effect]:
        """Remove clusters that have fallen apart: their volunteers choose again, and averagings go on without
        them, and without others that have left.
        """
        fallen = [cluster for cluster in self._clusters if cluster.dissolved is not None]
        effects: list[Effect] = [self._clusters.remove(cluster) for cluster in fallen]
        numbers = {cluster.number for cluster in fallen}
        effects += self._averagings.without(numbers, now)
        for cluster in fallen:
            for volunteer in cluster.members.volunteers.values():
                spared = volunteer.homeless()
                effects += self._unassigned.enter(spared, self._agendas.places(spared, now))
        return effects + self._form(self._queue.leave(numbers, now), now)

    def _found(self, now: float) -> list[Effect]:
        """Found a complete cluster from the last checkpoint; another one stores a new one first if needed."""
        forming = self._unfounded.due(now)
        if forming is None:
            return []
        record = self._unfounded.found(forming)
        return [record, *self.by(forming, forming.found(now, self._clusters.sync_factor))]

    def form(self, formation: Formation, now: float) -> list[Effect]:
        """Seat the volunteers of all clusters that are not founded, or are forming, as proposed."""
        return self.settle(self._unfounded.seat(formation, self._unfounded.divisible, now), now)

    def recut(self, recut: Recut, now: float) -> list[Effect]:
        """Have clusters fall apart for others, once nothing is lost by it."""
        self._agendas.recutting.propose(recut, now)
        left = () if self._averagings.sparse else recut.retiring  # they average without the scheduler
        return self.settle(self._form(self._queue.leave(left, now), now), now)

    def _recut(self, now: float) -> list[Effect]:
        """Let clusters fall apart whose volunteers form others, once nothing is lost by it."""
        recutting, waiting = self._agendas.recutting, self._unfounded.divisible
        held = recutting.held
        if not self._agendas.trains_on:
            recutting.drop()
        recut = recutting.due([peer for c in waiting for peer in c.members.volunteers], now)
        if recut is None:
            freed = [c for c in self._clusters.living if c.number in held - recutting.held]
            return [effect for c in freed for effect in self.by(c, c.go_on(now))]
        retiring = [self._clusters[number] for number in sorted(recut.retiring)]
        effects = self._unfounded.seat(recut.formation, [*waiting, *retiring], now)
        for cluster in retiring:
            cluster.dissolve(WHY, {})
        return effects

    def _cover(self, now: float) -> list[Effect]:
        """Let clusters that retire average with one that stays, so that nothing is lost with them."""
        recutting = self._agendas.recutting
        held, group = recutting.held, recutting.together()
        numbers = {cluster.number for cluster in group}
        in_line = [number for number in numbers if self._queue.waits(number)]  # the one that stays, at most
        effects = self._form(self._queue.leave(in_line, now), now) + self._average(group, now)
        for number in sorted(held - recutting.held - numbers):
            effects += self.by(self._clusters[number], self._clusters[number].go_on(now))
        return effects

    def place_spares(self, now: float) -> list[Effect]:
        """Move volunteers that have waited long enough."""
        return [effect for cluster, told in self._spares.place(now) for effect in self.by(cluster, told)]

    # ── averagings ──────────────────────────────────────────────────────────────────────────────────────────

    def _decide(self, now: float) -> list[Effect]:
        """Log an averaging that is decided, or halt the run if one cannot be."""
        for one in self._averagings.under_way():
            if one.reduce.trouble is not None:
                why = f"{one.reduce.trouble} in group {one.number}"
                halt = self._clusters.log(kind="halt", why=why)
                return [halt, *self._close(m.Finished(why=why, completed=False))]
        record = self._averagings.decided(now)
        if record is None:
            return []
        numbers = [number for number, _ in record["clusters"]]
        if not all(self._agendas.order.overlaps(self._clusters[number]) for number in numbers):
            self._queue.averaged(record["seconds"])  # of those that never stop, nobody waits less for it
        return [*self._log_average(record, "average", numbers, now), *self._leave_behind(numbers)]

    def _leave_behind(self, members: Sequence[int]) -> list[Effect]:
        """Dissolve clusters that a sparse averaging of `members` was without: they have another anchor."""
        effects: list[Effect] = []
        for cluster in self._clusters.living if self._averagings.sparse else ():
            if cluster.number not in members and cluster.dissolved is None:
                effects += self.by(cluster, cluster.fall_apart("the others averaged without it"))
        return effects

    def _install(self, now: float) -> list[Effect]:
        """Install a decided mean in a cluster that stands between two steps, or has come to its place.

        It is void if the cluster has lost all that have it of some block.
        """
        for number, record in self._averagings.promised.items():
            cluster = self._clusters[number]
            if not cluster.takes_mean or cluster.dissolved is not None:
                continue
            if not cluster.can_install(self._averagings.members(number)):
                return self.by(cluster, cluster.goes_without_mean(now)) or self._remove_dissolved(now)
            return self._log_average(record, "installed", (number,), now)
        return []

    def _log_average(
        self, record: Mapping[str, Any], kind: str, clusters: Iterable[int], now: float
    ) -> list[Effect]:
        """Log an averaging and install it in those of `clusters` that can take a mean now."""
        members = {number: self._averagings.members(number) for number in clusters}
        taking = [self._clusters[number] for number in members if self._clusters[number].takes_mean]
        ready = [cluster for cluster in taking if cluster.can_install(members[cluster.number])]
        steps = [(cluster.number, cluster.history.version) for cluster in ready]
        members = {cluster.number: members[cluster.number] for cluster in ready}
        held = held_in_averaging(members)
        for cluster in ready:
            cluster.moves_on()
        views = [(cluster.number, cluster.line.view) for cluster in ready if cluster.line.view]
        lines = {"views": views} if views else {}
        effects: list[Effect] = [self._clusters.log(kind=kind, **record, installed=steps, held=held, **lines)]
        for cluster in ready:
            effects += self.by(cluster, cluster.installs(members[cluster.number], now))
        return effects

    def _begin_anew(self, now: float) -> list[Effect]:
        """Begin steps anew in clusters that have left their group: the mean before them does not come."""
        left = [c for c in self._clusters if c.mean is not None and not self._averagings.busy(c.number)]
        return [effect for cluster in left for effect in self.by(cluster, cluster.begins_anew(now))]

    def _leave_line(self, now: float) -> list[Effect]:
        """Take clusters out of the queue that lack a block: they line up again once it is held."""
        torn = [c.number for c in self._clusters if self._queue.waits(c.number) and not c.whole]
        return self._form(self._queue.leave(torn, now), now)

    def _line_up(self, now: float) -> list[Effect]:
        """Queue up clusters that have trained their batches."""
        if not self._agendas.trains_on:
            return []
        self._put_off(now)
        for cluster in self._clusters:
            number = cluster.number
            joins = self._takes_part(cluster) and not self._queue.knows(number)
            if cluster.whole and (joins or number not in self._arrived):
                self._arrived.add(number)
                self._clusters.sync_factor = max(1, self._clusters.sync_factor // 2)
                cluster.begins(now)
            if joins:
                base = (cluster.history.base or {}).get("cluster")
                return self._form(self._queue.join(number, base, now), now) or self._line_up(now)
        for cluster in self._clusters:
            number = cluster.number
            if self._is_ready(cluster) and not self._queue.waits(number):
                self._averagings.called = self._averagings.sparse
                return self._form(self._queue.line_up(number, now), now) or self._line_up(now)
        return []

    def _put_off(self, now: float) -> None:
        """Put averagings off while a complete cluster waits for a checkpoint with the anchor of all others.

        Otherwise each checkpoint might be outdated by an averaging before it is stored, and the cluster would
        wait for ever.
        """
        waits = self._averagings.sparse and self._agendas.awaits_founding
        if not waits or self._averagings.called or self._averagings.under_way():
            self._put_off_since = None
        elif self._put_off_since is None:
            self._put_off_since = now
        since = self._put_off_since
        self._averagings.put_off = since is not None and now < since + FOUNDING_S

    def _takes_part(self, cluster: Cluster) -> bool:
        """Whether `cluster` counts in the queue: once it is whole; where all must have one anchor, once it is
        founded, so that no averaging is without it.
        """
        return cluster.founded if self._averagings.sparse else cluster.whole

    def _is_ready(self, cluster: Cluster) -> bool:
        """Whether `cluster` has trained enough batches since its last group, and may join another."""
        due = self._averagings.due(cluster.number, cluster.history.version)
        free = due and not self._averagings.busy(cluster.number) and cluster.whole
        if cluster.number in self._agendas.recutting.held and not self._averagings.sparse:
            return False  # it averages without the scheduler
        return free and (cluster.at_rest or self._agendas.order.overlaps(cluster))

    def _form(self, groups: Iterable[Sequence[int]], now: float) -> list[Effect]:
        """Let `groups` average, without clusters that have fallen apart or lack a block meanwhile.

        Sparse averagings are not made without one that lacks a block: all line up again.
        """
        effects: list[Effect] = []
        for group in groups:
            here = [cluster for cluster in map(self._clusters.get, group) if cluster and cluster.whole]
            if not self._averagings.sparse or len(here) == len(self._clusters.living):
                effects += self._average(here, now)
        return effects

    def _average(self, members: Sequence[Cluster], now: float, *, last: bool = False) -> list[Effect]:
        """Let `members` average. A single cluster skips it, unless it must follow its own movement.

        Clusters that need not stop go on training.
        """
        effects: list[Effect] = []
        if len(members) > 1 or (members and self._averagings.sparse):
            effects += self._averagings.begin({c.number: c.context for c in members}, now, last=last)
        else:
            for alone in members:
                self._averagings.skip(alone.number, alone.history.version)
        for cluster in members:
            if not self._averagings.stands_still(cluster.number):
                effects += self.by(cluster, cluster.go_on(now))
        return effects

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, now: float) -> list[Effect]:
        """End the run once all batches are in: all clusters average; one evaluates and stores the result."""
        living = self._clusters.living
        if self._agendas.trains_on or not living or not all(c.whole and c.at_rest for c in living):
            return []
        if any(self._averagings.busy(cluster.number) for cluster in living):
            return []
        if not self._agendas.agreed:
            self._queue.close(now)
            return self._average(living, now, last=True)
        heir = self._agendas.heir
        return self.complete() if self._agendas.over else self.by(heir, heir.go_on(now))

    def complete(self) -> list[Effect]:
        """Finish the run: nothing is left to do."""
        return self._close(m.Finished(why=f"all {self._config.steps} batches are committed", completed=True))

    def _close(self, end: m.Finished, but: Cluster | None = None) -> list[Effect]:
        self.state = CoordinatorState.FINISHED
        told: list[Effect] = [
            Send(peer, end) for c in self._clusters if c is not but for peer in c.members.volunteers
        ]
        halt: list[Effect] = [Halt(end.why, end.completed)] if but is None else []
        return [*told, *self._unassigned.close(end), *halt]
