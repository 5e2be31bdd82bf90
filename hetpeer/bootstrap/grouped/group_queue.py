"""Clusters that wait for a group, and the group scheduler that makes groups of them.

Pure. The scheduler's workers are clusters, its only stage is the whole pipeline. Docs: averaging.md, "Who with whom".
"""

from __future__ import annotations

from collections.abc import Iterable

from hetpeer.averaging.groups.group_scheduler import Group, GroupScheduler

STAGE = 0
Groups = list[tuple[int, ...]]


class GroupQueue:
    """All methods take clusters by their numbers and return the groups that come of it. `scheduler` knows no worker yet."""

    def __init__(self, scheduler: GroupScheduler) -> None:
        self._scheduler = scheduler
        self._present: set[int] = set()
        self._in_line: set[int] = set()

    def knows(self, cluster: int) -> bool:
        """Whether it takes part."""
        return cluster in self._present

    def waits(self, cluster: int) -> bool:
        """Whether it stands in line."""
        return cluster in self._in_line

    def join(self, cluster: int, base: int | None, now: float) -> Groups:
        """It takes part from now on, with the parameters that `base` had."""
        self._present.add(cluster)
        like = str(base) if base in self._present else None
        return self._formed(self._scheduler.joined(str(cluster), like, now))

    def line_up(self, cluster: int, now: float) -> Groups:
        """It waits until a group takes it in."""
        self._in_line.add(cluster)
        return self._formed(self._scheduler.ready(STAGE, str(cluster), now))

    def leave(self, clusters: Iterable[int], now: float) -> Groups:
        """They do not take part any more."""
        groups: Groups = []
        for cluster in sorted(self._present.intersection(clusters)):
            self._present.discard(cluster)
            self._in_line.discard(cluster)
            groups += self._formed(self._scheduler.left(str(cluster), now))
        return groups

    def averaged(self, seconds: float) -> None:
        """A group has averaged, and it took so long."""
        self._scheduler.averaged(seconds)

    def close(self, now: float) -> None:
        """Nobody waits any more; who did is not averaged."""
        self.leave(list(self._present), now)

    def tick(self, now: float) -> Groups:
        """Time passes."""
        return self._formed(self._scheduler.tick(now))

    def _formed(self, groups: Iterable[Group]) -> Groups:
        formed = [tuple(int(name) for name in group.members) for group in groups]
        self._in_line.difference_update(*formed)
        return formed
