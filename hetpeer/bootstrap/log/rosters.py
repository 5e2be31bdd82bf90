"""Blocks that each volunteer held in each decided step, folded from the log.

Pure. A commit names the members of the step's roster by their numbers (`held`: number, begin, end, …), the
record of an averaging by their ids (`held`: cluster, peer, begin, end). Records of versions before 5 name
nobody; there the volunteers whose work counted are taken for holders of all blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hetpeer.bootstrap.log.credit import Contributors
from hetpeer.bootstrap.log.history import Record, decisions_of

Place = tuple[int, int]
"""First block of a place, and the block after its last."""


def held_in_averaging(rosters: Mapping[int, Mapping[str, Place]]) -> list[list[Any]]:
    """`rosters` of clusters in the form of an averaging's record."""
    return [
        [cluster, peer, *place]
        for cluster, roster in sorted(rosters.items())
        for peer, place in sorted(roster.items())
    ]


class _Span(NamedTuple):
    """Decided steps in a row in which a volunteer had one place."""

    first: int
    last: int
    place: Place


class Rosters:
    """Volunteer → the decided steps in whose roster it was, and its place there; `blocks`: of the model."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._contributors = Contributors()
        self._spans: dict[str, dict[tuple[int, int], list[_Span]]] = {}
        """Volunteer → cluster and view → spans, by rising steps."""

    def __contains__(self, peer: str) -> bool:
        """Whether `peer` was in any roster."""
        return peer in self._spans

    def add(self, record: Record) -> Iterator[tuple[str, int]]:
        """Fold one more record; yields (volunteer, blocks that it held) for each decision in it."""
        if record["kind"] == "commit":
            self._contributors.add(record)
        for decision in decisions_of(record):
            for peer, place in self._roster(record, decision.cluster):
                self._note(peer, (decision.cluster, decision.view), decision.step, place)
                yield peer, place[1] - place[0]

    def had(self, peer: str, cluster: int, view: int, step: int, block: int | None = None) -> bool:
        """Whether `peer` was in the roster of this decided step, and held `block`, if one is given."""
        spans = self._spans.get(peer, {}).get((cluster, view), [])
        span = next(iter(spans[(at := bisect_right(spans, step, key=_first)) - 1 : at]), None)
        if span is None or step > span.last:
            return False
        return block is None or span.place[0] <= block < span.place[1]

    def _note(self, peer: str, line: tuple[int, int], step: int, place: Place) -> None:
        spans = self._spans.setdefault(peer, {}).setdefault(line, [])
        if spans and spans[-1].last + 1 == step and spans[-1].place == place:
            spans[-1] = spans[-1]._replace(last=step)
        else:
            spans.append(_Span(step, step, place))

    def _roster(self, record: Record, cluster: int) -> Iterable[tuple[str, Place]]:
        """Members of `cluster` in the roster of `record`, each with its place."""
        held = record.get("held")
        if record["kind"] != "commit":
            return [(peer, (begin, end)) for of, peer, begin, end in held or () if of == cluster]
        if held is None:
            return [
                (peer, (0, self._blocks)) for peer, _ in self._contributors.read(record.get("counted", ()))
            ]
        return self._contributors.held(held)


def _first(span: _Span) -> int:
    return span.first
