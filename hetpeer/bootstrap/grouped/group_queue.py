"""The queue of clusters that wait for a group, with the group scheduler.

Pure. The scheduler's workers are clusters, and its only stage is the whole pipeline (docs/averaging.md, "Who
averages with whom").
"""

from __future__ import annotations

from collections.abc import Iterable

from hetpeer.averaging.groups.group_scheduler import Group, GroupScheduler

STAGE = 0
Groups = list[tuple[int, ...]]


class GroupQueue:
    """Queue of clusters. Methods take clusters by number and return the groups that form.

    `scheduler` knows no worker yet.
    """

    def __init__(self, scheduler: GroupScheduler) -> None:
        self._scheduler = scheduler
        self._present: set[int] = set()
        self._in_line: set[int] = set()

    def knows(self, cluster: int) -> bool:
        """Whether it takes part."""
        return cluster in self._present

    def waits(self, cluster: int) -> bool:
        """Whether it waits for a group."""
        return cluster in self._in_line

    def join(self, cluster: int, base: int | None, now: float) -> Groups:
        """Let it take part from now on, with the parameters that `base` had."""
        self._present.add(cluster)
        like = str(base) if base in self._present else None
        return self._formed(self._scheduler.joined(str(cluster), like, now))

    def line_up(self, cluster: int, now: float) -> Groups:
        """Let it wait until a group takes it in."""
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

    def tick(self, now: float) -> Groups:
        """Form groups whose waiting time is over."""
        return self._formed(self._scheduler.tick(now))

    def _formed(self, groups: Iterable[Group]) -> Groups:
        formed = [tuple(int(name) for name in group.members) for group in groups]
        self._in_line.difference_update(*formed)
        return formed
