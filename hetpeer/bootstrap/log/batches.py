"""Batch → the clusters whose parameters contain it, in a grouped run.

Pure: a fold of the log, and the batches handed out since. A batch is *in* a cluster if the cluster trained
it, or averaged with a cluster that it is in. It counts from the log's decision of the averaging on, before
the mean is installed. When a cluster falls apart, batches that are in no other cluster are trained again
(docs/grouped.md, "Exactly once"). So are those that a cluster loses when it goes back to a checkpoint.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from hetpeer.bootstrap.log.history import Record

PROMISED = 1 << 62
"""Version of a batch that will be in the cluster once the cluster installs a decided mean."""


class BatchLineage:
    """Batches, `count` in all, that are in each cluster, and the batch to train next."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._in: dict[int, dict[int, tuple[int, int]]] = {}
        """Living cluster → batch → (commit in the log, cluster's first version with it or PROMISED)."""
        self._holders: Counter[int] = Counter()
        """Batch → number of living clusters that it is in."""
        self._stored: dict[int, int] = {}
        """Batch → commit, for the batches in the last checkpoint."""
        self._settled: dict[int, int] = {}
        """Batch → commit: in the checkpoint and all clusters, present and future. No entry elsewhere."""
        self._commits = 0
        self._promised: dict[int, Mapping[int, int]] = {}
        """Cluster → batch → commit, for the mean that the cluster will install."""
        self._handed: defaultdict[int, set[int]] = defaultdict(set)
        """Cluster → batches that it trains now."""
        self._fresh = 0
        """First batch that was never handed out."""
        self._again: list[int] = []
        """Heap of smaller batches that may be in no cluster; some entries are outdated."""
        self.unsaved = 0
        """Commits since the last checkpoint."""

    def add(self, record: Record) -> None:
        """Fold one more record of the log."""
        cluster = record.get("cluster", 0)
        match record["kind"]:
            case "commit":
                self._commits += 1
                self._handed[cluster].discard(record["batch"])
                self._put(cluster, {record["batch"]: self._commits}, record["step"] + 1)
                self._seen(record["batch"])
                self.unsaved += 1
            case "reign":
                for promised in list(self._promised):
                    self._break(promised)
            case "average":
                together: dict[int, int] = {}
                for member, version in record["clusters"]:
                    together |= {
                        b: commit for b, (commit, since) in self._in[member].items() if since <= version
                    }
                for member, _ in record["clusters"]:
                    self._promised[member] = together
                    self._put(member, together, PROMISED)
                self._install(record)
            case "installed":
                self._install(record)
            case "checkpoint":
                known, version = self._in[cluster], record["version"]
                self._stored = {batch: commit for batch, (commit, since) in known.items() if since <= version}
                self.unsaved = 0
                self._settle()
            case "founded":
                self._in[cluster] = {}
                self._put(cluster, self._stored, record["version"])
            case "rollback":
                self._go_back(cluster, record["to_version"])
            case "dissolved":
                self._promised.pop(cluster, None)
                for handed in self._handed.pop(cluster, ()):
                    heapq.heappush(self._again, handed)
                for batch in self._in.pop(cluster, {}):
                    self._lose(batch)
                if not self._in:  # the settled batches are only in the checkpoint
                    self._again = sorted([*self._again, *self._settled])
            case _:
                pass

    def _settle(self) -> None:
        """Settle batches in the checkpoint and every cluster, else the tables would grow with the run."""
        everywhere = {
            batch: commit
            for batch, commit in self._stored.items()
            if all(batch in known and known[batch][1] != PROMISED for known in self._in.values())
            and all(known[batch][0] == commit for known in self._in.values())
        }
        for batch in everywhere:
            del self._stored[batch], self._holders[batch]
            for known in self._in.values():
                del known[batch]
        self._settled |= everywhere

    def _install(self, record: Record) -> None:
        for cluster, step in record["installed"]:
            known = self._in[cluster]
            for batch, commit in self._promised.pop(cluster).items():
                if batch in known and known[batch][1] == PROMISED:
                    known[batch] = (commit, step + 1)

    def _go_back(self, cluster: int, version: int) -> None:
        """Take out of `cluster` what came after `version`: its own, or that of the last checkpoint.

        A decided mean that is not installed is void: nobody has it in the new view. Others may still have
        what was taken out.
        """
        for handed in self._handed.pop(cluster, ()):
            heapq.heappush(self._again, handed)
        self._promised.pop(cluster, None)
        known = self._in.get(cluster, {})
        for batch in [batch for batch, (_, since) in known.items() if since > version]:
            del known[batch]
            self._lose(batch)
        if self._in.keys() == {cluster}:
            self.unsaved = len(known.keys() - self._stored.keys())

    def _break(self, cluster: int) -> None:
        """Drop the decided mean that `cluster` will not install."""
        known = self._in[cluster]
        for batch in self._promised.pop(cluster):
            if batch in known and known[batch][1] == PROMISED:
                del known[batch]
                self._lose(batch)

    def _lose(self, batch: int) -> None:
        self._holders[batch] -= 1
        if not self._holders[batch]:
            heapq.heappush(self._again, batch)

    def _put(self, cluster: int, batches: Mapping[int, int], version: int) -> None:
        known = self._in[cluster]
        for batch, commit in batches.items():
            if batch not in known and batch not in self._settled:
                known[batch] = (commit, version)
                self._holders[batch] += 1

    def _seen(self, batch: int) -> None:
        """Note that `batch` was handed out; hand-outs are not in the log, commits are."""
        for skipped in range(self._fresh, batch):
            heapq.heappush(self._again, skipped)
        self._fresh = max(self._fresh, batch + 1)

    # ── handing out ─────────────────────────────────────────────────────────────────────────────────────────

    def take(self, cluster: int) -> int | None:
        """Hand out the next batch that is in no cluster and with no cluster; None if there is none now."""
        batch = self._next()
        if batch is not None:
            self._handed[cluster].add(batch)
        return batch

    def hand_back(self, cluster: int, batch: int) -> None:
        """Return a batch that `cluster` cannot train now."""
        self._handed[cluster].discard(batch)
        heapq.heappush(self._again, batch)

    def _next(self) -> int | None:
        while self._again:
            batch = heapq.heappop(self._again)
            if not self._is_held(batch) and batch not in self._in_hands:
                return batch
        if self._fresh == self._count:
            return None
        self._fresh += 1
        return self._fresh - 1

    @property
    def _in_hands(self) -> set[int]:
        return set().union(*self._handed.values())

    @property
    def known(self) -> int:
        """Number of batches in living clusters."""
        return len(+self._holders) + (len(self._settled) if self._in else 0)

    def _is_held(self, batch: int) -> bool:
        """Whether `batch` is in a living cluster."""
        return self._holders[batch] > 0 or (batch in self._settled and bool(self._in))

    @property
    def exhausted(self) -> bool:
        """Whether all batches are in living clusters."""
        while self._again and self._is_held(self._again[0]):
            heapq.heappop(self._again)
        return self._fresh == self._count and not self._again and not self._in_hands

    # ── founding ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def living(self) -> frozenset[int]:
        """Clusters with parameters of their own."""
        return frozenset(self._in)

    @property
    def compatible(self) -> bool:
        """Whether a cluster may begin from the last checkpoint: none of its batches is or was retrained."""
        stored = self._stored
        again = any(
            stored.get(batch, commit) != commit
            for known in self._in.values()
            for batch, (commit, _) in known.items()
        )
        in_hands = self._in_hands
        return not again and stored.keys().isdisjoint(in_hands) and self._settled.keys().isdisjoint(in_hands)

    def commits(self) -> set[int]:
        """Commits in the current result: living clusters', or the last checkpoint's if no cluster lives."""
        if not self._in:
            return {*self._stored.values(), *self._settled.values()}
        return {
            *self._settled.values(),
            *(commit for known in self._in.values() for commit, _ in known.values()),
        }

    def are_elsewhere(self, cluster: int, leaving: Collection[int], *, promised: bool = False) -> bool:
        """Whether nothing would be trained again if the clusters `leaving`, `cluster` among them, fell apart.

        So all that is in `cluster` is in others, and it trains nothing. `promised`: or will be in others once
        they install a decided mean.
        """
        others = [known for other, known in self._in.items() if other not in leaving]
        held = self._in[cluster].keys() | self._handed[cluster]
        return bool(others) and all(
            any(batch in known and (promised or known[batch][1] != PROMISED) for known in others)
            for batch in held
        )

    def are_saved_elsewhere(self, cluster: int) -> bool:
        """Whether all batches of the last checkpoint are in living clusters other than `cluster`."""
        others = [known for other, known in self._in.items() if other != cluster]
        return bool(others) and all(
            any(batch in known and known[batch][1] != PROMISED for known in others) for batch in self._stored
        )

    def inside(self, cluster: int) -> Mapping[int, int]:
        """Batch → commit, for the batches in `cluster`."""
        return self._settled | {batch: commit for batch, (commit, _) in self._in[cluster].items()}
