"""Agendas of the clusters of a grouped run: batches, checkpoints, and the queue for a group.

Pure: it reads the clusters and what is folded from the log (batches.py, averagings.py). A cluster's agenda is
its share of the run (docs/grouped.md, "Grouped runs"). The workers of the group scheduler are clusters, and
its only stage is the whole pipeline (docs/averaging.md, "Who averages with whom").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.groups.group_scheduler import Group, GroupPipelines
from hetpeer.bootstrap.grouped.averagings import Averagings
from hetpeer.bootstrap.grouped.cluster import Cluster
from hetpeer.bootstrap.grouped.cluster_list import Clusters
from hetpeer.bootstrap.grouped.mean_order import MeanOrder
from hetpeer.bootstrap.grouped.recut import Recutting
from hetpeer.bootstrap.log.batches import BatchLineage
from hetpeer.bootstrap.state.effects import CoordinatorConfig, NextStep
from hetpeer.bootstrap.state.volunteer_state import VolunteerState

STAGE = 0
Groups = list[tuple[int, ...]]


class GroupQueue:
    """Queue of clusters, by number; methods return the groups that form. `scheduler` knows no worker yet."""

    def __init__(self, scheduler: GroupPipelines) -> None:
        self._scheduler = scheduler
        self._present: set[int] = set()
        self._in_line: set[int] = set()

    def knows(self, cluster: int) -> bool:
        """Whether `cluster` takes part."""
        return cluster in self._present

    def waits(self, cluster: int) -> bool:
        """Whether `cluster` waits for a group."""
        return cluster in self._in_line

    def join(self, cluster: int, base: int | None, now: float) -> Groups:
        """Let `cluster` take part from now on, with the parameters that `base` had."""
        self._present.add(cluster)
        like = str(base) if base in self._present else None
        return self._formed(self._scheduler.joined(str(cluster), like, now))

    def line_up(self, cluster: int, now: float) -> Groups:
        """Let `cluster` wait for a group. Returns the groups that form now."""
        self._in_line.add(cluster)
        return self._formed(self._scheduler.ready(STAGE, str(cluster), now))

    def leave(self, clusters: Iterable[int], now: float) -> Groups:
        """Remove clusters."""
        groups: Groups = []
        for cluster in sorted(self._present.intersection(clusters)):
            self._present.discard(cluster)
            self._in_line.discard(cluster)
            groups += self._formed(self._scheduler.left(str(cluster), now))
        return groups

    def averaged(self, seconds: float) -> None:
        """Note that a group took this long to average."""
        self._scheduler.averaged(seconds)

    def close(self, now: float) -> None:
        """Empty the queue: no groups form any more."""
        self.leave(list(self._present), now)

    @property
    def due_at(self) -> float:
        """End of the wait window; infinite if there is none, past while clusters wait for others."""
        return self._scheduler.due_at

    def tick(self, now: float) -> Groups:
        """Form groups whose waiting time is over."""
        return self._formed(self._scheduler.tick(now))

    def _formed(self, groups: Iterable[Group]) -> Groups:
        formed = [tuple(int(name) for name in group.members) for group in groups]
        self._in_line.difference_update(*formed)
        return formed


class ClusterAgendas:
    """Agendas of all clusters. Methods take clusters by number."""

    def __init__(
        self, config: CoordinatorConfig, clusters: Clusters, batches: BatchLineage, averagings: Averagings
    ) -> None:
        self._config = config
        self._clusters = clusters
        self._batches = batches
        self._averagings = averagings
        self.order = MeanOrder(config, averagings)
        self.recutting = Recutting(clusters, batches, averagings, self.order)

    # ── opening clusters ────────────────────────────────────────────────────────────────────────────────────

    def begin(self, now: float) -> None:
        """Open the clusters that exist by the log."""
        for number in sorted(self._batches.living):
            self._open(number, now, founded=True)

    def places(self, volunteer: VolunteerState, now: float) -> list[m.Place]:
        """Places of forming clusters that others have begun; if none fits, those of an empty one too."""
        forming = [cluster for cluster in self._clusters if not cluster.founded and cluster.dissolved is None]
        begun = [cluster for cluster in forming if cluster.members.volunteers]
        places = [place for cluster in begun for place in cluster.places_for(volunteer)]
        if any(place.open and volunteer.has_room(place) for place in places):
            return places
        empty = self.empty(now)
        empty.members.recut(self._clusters.usual(empty.number))  # those it was cut for have left
        return [*places, *empty.members.places()]

    def replicas(self, volunteer: VolunteerState, *, gaps: bool) -> list[m.Place]:
        """Places of living clusters for one more holder, or only those that nobody has (`gaps`); none if none
        fits `volunteer`'s memory.
        """
        living = [cluster for cluster in self._clusters.living if cluster.admits]
        places = [
            place
            for cluster in living
            for place in cluster.places_for(volunteer)
            if not gaps or (place.begin, place.end) in cluster.gaps
        ]
        fits = any(place.open and volunteer.has_room(place) for place in places)
        return places if fits and self.trains_on else []

    def empty(self, now: float) -> Cluster:
        """A cluster that nobody has begun."""
        here = [c for c in self._clusters if not c.founded and c.dissolved is None]
        found = next((cluster for cluster in here if not cluster.members.volunteers), None)
        return self._open(self._clusters.unused, now, founded=False) if found is None else found

    def _open(self, number: int, now: float, *, founded: bool) -> Cluster:
        share = _Share(self, self._clusters, number)
        return self._clusters.open(number, share, now, founded=founded)

    # ── what clusters ask ───────────────────────────────────────────────────────────────────────────────────

    def take(self, number: int, ahead: int) -> NextStep | None:
        """The next work of `number`, beside `ahead` steps under way."""
        cluster = self._clusters[number]
        if self._ending:
            evaluates = cluster is self.heir and not self._evaluated and not ahead
            evaluates = evaluates and not self._averagings.busy(number)
            return NextStep(self._config.steps, trains=False, evaluates=True) if evaluates else None
        if self.recutting.holds(number):
            return None
        after_mean = self.order.after_mean(cluster, ahead)
        if after_mean is None:
            return None
        batch = self._batches.take(number)
        if batch is None:
            return None
        due = self._config.evaluation_microbatches > 0 and batch % self._config.evaluate_every == 0
        if ahead and (due or batch < self._config.fresh_steps):
            self._batches.hand_back(number, batch)
            return None
        averages = cluster.history.averages
        last = len(averages[max(averages)]["clusters"]) if averages else 1
        workers = last if self._config.corrected else 1
        return NextStep(batch, evaluates=due, workers=workers, after_mean=after_mean)

    def may_go_back(self, number: int) -> bool:
        """Whether `number` goes back to its own checkpoint rather than fall apart.

        Not if others have all that is in the checkpoint: a new cluster begins with their newer parameters,
        and nothing more is lost by it.
        """
        if all(c.number == number or c.dissolved is not None for c in self._clusters.living):
            return True
        return self._averagings.may_go_back and not self._batches.are_saved_elsewhere(number)

    def may_save(self, number: int) -> bool:
        """Whether `number` may store its parameters now; nobody does while others fetch a checkpoint.

        Nor while another one stores its own: that would end without a word.
        """
        saver = self._clusters.saver
        free = saver is None or saver.number == number
        return free and all(cluster.whole for cluster in self._clusters.living)

    def saves(self, number: int) -> bool:
        """Whether `number` is to store its parameters, once it may."""
        if self._ending:
            return number == self.heir.number
        if self.awaits_founding and self._averagings.unstored:
            return True
        return self._batches.unsaved >= (1 if self.awaits_founding else self._config.checkpoint_every)

    @property
    def awaits_founding(self) -> bool:
        """Whether a complete cluster is to be founded: a checkpoint is wanted for it."""
        return any(not cluster.founded and cluster.complete for cluster in self._clusters)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def trains_on(self) -> bool:
        """Whether some batch is in no living cluster."""
        return not self._batches.exhausted

    @property
    def may_found(self) -> bool:
        """Whether a new cluster may begin from the last checkpoint: it is useful, the checkpoint current."""
        batches, current = self._batches, self._averagings.may_found
        return not self._clusters.living or (
            self.trains_on and current and not batches.unsaved and batches.compatible
        )

    @property
    def agreed(self) -> bool:
        """Whether all clusters have the same parameters, by a last averaging of all of them."""
        living = self._clusters.living
        last = {c.number: c.history.version - 1 for c in living}
        records = [c.history.averages.get(c.history.version - 1, {}) for c in living]
        return len(living) == 1 or all(dict(one.get("clusters", ())) == last for one in records)

    @property
    def over(self) -> bool:
        """Whether all batches are in, averaged, evaluated and stored."""
        return self._ending and self._evaluated and self.heir.history.stored

    @property
    def _ending(self) -> bool:
        """Whether only the last evaluation and checkpoint are left, which the heir does."""
        return not self.trains_on and bool(self._clusters.living) and self.agreed

    @property
    def heir(self) -> Cluster:
        """The cluster that trains the batches left at the end."""
        return min(self._clusters.living, key=lambda cluster: cluster.number)

    @property
    def _evaluated(self) -> bool:
        history = self.heir.history
        return not self._config.evaluation_microbatches or history.version in history.evaluations


class _Share:
    """The agenda of one cluster: its share of the run."""

    over = False

    def __init__(self, agendas: ClusterAgendas, clusters: Clusters, number: int) -> None:
        self._agendas = agendas
        self._clusters = clusters
        self._number = number

    def take(self, ahead: int = 0) -> NextStep | None:
        return self._agendas.take(self._number, ahead)

    def saves(self, version: int) -> bool:  # noqa: ARG002 - whatever its version
        return self._agendas.saves(self._number)

    @property
    def may_save(self) -> bool:
        return self._agendas.may_save(self._number)

    @property
    def may_go_back(self) -> bool:
        return self._agendas.may_go_back(self._number)

    def logged(self, record: Mapping[str, Any]) -> None:
        self._clusters.logged(self._number, record)
