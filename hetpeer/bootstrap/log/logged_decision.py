"""Decisions in log records: the updates that holders may apply, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetpeer.bootstrap.log.history import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A committed step of one cluster, or its part in an averaging of `clusters`."""

    cluster: int
    view: int
    step: int
    plan: int
    digests: Mapping[int, str]
    """Block → digest of the sum to apply."""
    behind: int = 0
    """Staleness of the gradient, in updates."""
    batch: int = 0
    """Batch that was trained."""
    clusters: frozenset[int] = frozenset()
    counted: Sequence[int] | None = None
    """Credit of the commit in the record's form (credit.py); None: not stated."""

    @property
    def trains(self) -> bool:
        return not self.clusters

    @property
    def key(self) -> tuple[int, int, int, int]:
        return self.cluster, self.view, self.step, self.plan

    def __str__(self) -> str:
        return f"step {self.step} of cluster {self.cluster}" if self.cluster else f"step {self.step}"


def decisions_of(record: Record) -> Iterator[Decision]:
    """Decisions of a record: one for a commit, one per cluster that installed an averaging."""
    match record["kind"]:
        case "commit":
            yield Decision(
                cluster=record.get("cluster", 0),
                view=record["view"],
                step=record["step"],
                plan=record["plan"],
                digests={int(block): digest for block, digest in record["gradients"].items()},
                behind=record.get("behind", 0),
                batch=record.get("batch", record["step"]),
                counted=record.get("counted"),
            )
        case "average" | "installed":
            members = frozenset(cluster for cluster, _ in record["clusters"])
            digests = {int(block): digest for block, digest in record["sums"].items()}
            for cluster, step in record["installed"]:
                yield Decision(
                    cluster=cluster,
                    view=0,
                    step=step,
                    plan=record["plan"],
                    digests=digests,
                    clusters=members,
                )
        case _:
            return
