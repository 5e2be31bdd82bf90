"""Loss curves of a run, from its log, thinned to a bounded size for sending.

Pure. Reliable peers serve them beside the run's files; `Curves.decode` checks a peer's answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Final

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import unpack

MAX_POINTS: Final = 400
"""Largest number of points in a curve."""
MAX_BYTES: Final = 1 << 15

Number = Annotated[float, Field(allow_inf_nan=False)]
Point = tuple[Number, Number]


class Curve:
    """At most MAX_POINTS points in order of x: a full curve drops every second point and samples half."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._every = 1
        self._counted = 0
        self._last: Point | None = None
        """Newest point, shown even if it is not sampled."""

    def add(self, x: float, y: float) -> None:
        """Append a point with an x above the others; of several with the same x the first one counts."""
        if self._last is not None and x <= self._last[0]:
            return
        self._last = (x, y)
        if self._counted % self._every == 0:
            self._points.append(self._last)
        self._counted += 1
        if len(self._points) >= MAX_POINTS:
            del self._points[1::2]
            self._every *= 2

    def cut(self, x: float) -> None:
        """Drop all points after `x` (a roll-back)."""
        self._points = [point for point in self._points if point[0] <= x]
        self._counted = len(self._points) * self._every
        self._last = self._points[-1] if self._points else None

    @property
    def points(self) -> list[Point]:
        """Points in order, the newest last."""
        if self._last is None or self._last == self._points[-1]:
            return list(self._points)
        return [*self._points, self._last]


class Curves(BaseModel):
    """Loss over committed updates (batches, in a grouped run), in training and on held-out samples."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    training: Annotated[
        tuple[Annotated[Point, Field(strict=False)], ...], Field(max_length=MAX_POINTS, strict=False)
    ] = ()
    evaluation: Annotated[
        tuple[Annotated[Point, Field(strict=False)], ...], Field(max_length=MAX_POINTS, strict=False)
    ] = ()

    def encode(self) -> bytes:
        """The curves as msgpack."""
        data: bytes = msgpack.packb(self.model_dump())
        return data

    @classmethod
    def decode(cls, data: bytes | bytearray, peer: str) -> Curves:
        """The curves in an answer of `peer`. Raises `ProtocolError` if they are invalid."""
        plain = unpack(data, "loss curves", peer)
        try:
            return cls.model_validate(plain)
        except ValidationError as error:
            raise ProtocolError("loss curves that are none", peer=peer) from error


class LogCurves:
    """Curves of an exact run, folded from log records in order."""

    def __init__(self) -> None:
        self._training = Curve()
        self._evaluation = Curve()

    def add(self, record: Mapping[str, Any]) -> None:
        """One more record."""
        match record["kind"]:
            case "commit":
                self._training.add(record["batch"] + 1, record["loss"])
            case "evaluation":
                self._evaluation.add(record["batch"], record["loss"])
            case "rollback":
                self._training.cut(record["to_version"])
                self._evaluation.cut(record["to_version"])
            case _:
                pass

    @property
    def curves(self) -> Curves:
        """Curves of the records added so far."""
        return Curves(training=tuple(self._training.points), evaluation=tuple(self._evaluation.points))


class GroupedCurves:
    """Curves of a grouped run: batches come in any order, and again if no cluster has them any more.

    `counting` returns the commits in the result, numbered from 1 (credit.py); it must get each record first.
    """

    def __init__(self, counting: Callable[[], AbstractSet[int]]) -> None:
        self._counting = counting
        self._batches, self._losses = array("Q"), array("d")
        """Point of each commit."""
        self._evaluation: dict[float, float] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """One more record."""
        match record["kind"]:
            case "commit":
                self._batches.append(record["batch"] + 1)
                self._losses.append(record["loss"])
            case "evaluation":
                self._evaluation[record["batch"]] = record["loss"]
            case _:
                pass

    @property
    def curves(self) -> Curves:
        """Curves of the records added so far."""
        counting = self._counting()
        commits = enumerate(zip(self._batches, self._losses, strict=True), 1)
        training = [point for commit, point in commits if commit in counting]
        return Curves(training=thinned(training), evaluation=thinned(self._evaluation.items()))


def thinned(points: Iterable[Point]) -> tuple[Point, ...]:
    """Points thinned to at most MAX_POINTS in order of x, including the last."""
    ordered = sorted(points)
    every = -(-len(ordered) // (MAX_POINTS - 1)) or 1
    kept = ordered[::every]
    return tuple(kept if kept[-1:] == ordered[-1:] else [*kept, ordered[-1]])
