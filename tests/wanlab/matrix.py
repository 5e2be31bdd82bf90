"""What a laboratory network is like: who, how far apart, how fast, how lossy.

Read from JSON, checked, then plain data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_NODES = 200
KEYS = {
    "names",
    "nodes",
    "latency_ms",
    "bandwidth_mbps",
    "uplink_mbps",
    "downlink_mbps",
    "queue_ms",
    "loss",
    "no_inbound",
    "events",
}


class MatrixError(ValueError):
    """A matrix file that does not describe a network."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change of the network at a time after its start, in seconds; `order` as in network.py."""

    at_s: float
    order: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A network of `len(names)` nodes. Square tables are [from][to]; a rate of 0 is no limit.

    Latency is one way, in seconds; rates are bytes/s of IP packets; `loss` is the probability of each packet.
    """

    names: tuple[str, ...]
    latency_s: tuple[tuple[float, ...], ...]
    rate: tuple[tuple[float, ...], ...]
    """Of each ordered pair alone."""
    uplink: tuple[float, ...]
    downlink: tuple[float, ...]
    """Of each node, shared by all its pairs."""
    loss: tuple[tuple[float, ...], ...]
    queue_s: float = 0.1
    """A packet that would wait longer than this for a line is dropped, as a router with so much buffer
    does.
    """
    no_inbound: frozenset[int] = frozenset()
    """Nodes that take packets only of flows which they opened themselves."""
    events: tuple[Event, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def load(cls, path: Path) -> Matrix:
        """Read a file. Raises MatrixError with what is wrong, OSError."""
        try:
            data = json.loads(path.read_text())
        except ValueError as error:
            raise MatrixError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise MatrixError(f"{path} is not a JSON object")
        return cls.of(data)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Matrix:
        """From what the JSON says: a number stands for all nodes or pairs alike. Raises MatrixError."""
        if unknown := sorted(data.keys() - KEYS):
            raise MatrixError(f"unknown entries: {', '.join(unknown)}; known: {', '.join(sorted(KEYS))}")
        names = tuple(data.get("names", ())) or tuple(f"n{i}" for i in range(_count(data)))
        if not 1 <= len(names) <= MAX_NODES or len(set(names)) != len(names):
            raise MatrixError(f"{len(names)} nodes; 1 to {MAX_NODES} with different names are possible")
        n = len(names)
        mbps = 125_000.0
        numbers = {name: index for index, name in enumerate(names)}
        try:
            closed = frozenset(
                numbers[x] if isinstance(x, str) else range(n)[x] for x in data.get("no_inbound", ())
            )
        except (KeyError, IndexError, TypeError) as error:
            raise MatrixError(f"no_inbound names a node that is not there: {error}") from error
        return cls(
            names=names,
            latency_s=_table(data, "latency_ms", n, 1e-3),
            rate=_table(data, "bandwidth_mbps", n, mbps),
            uplink=_row(data, "uplink_mbps", n, mbps),
            downlink=_row(data, "downlink_mbps", n, mbps),
            loss=_table(data, "loss", n, 1.0),
            queue_s=_number(data.get("queue_ms", 100), "queue_ms") / 1e3,
            no_inbound=closed,
            events=tuple(Event(_number(e["t"], "t"), str(e["do"])) for e in data.get("events", ())),
        )


def _count(data: dict[str, Any]) -> int:
    latency = data.get("latency_ms")
    nodes = data.get("nodes", len(latency) if isinstance(latency, list) else 0)
    return nodes if isinstance(nodes, int) else 0


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise MatrixError(f"{name}: {value!r} is no number from 0 on")
    return float(value)


def _vector(value: object, name: str, n: int, unit: float) -> tuple[float, ...]:
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value] * n
    if len(values) != n:
        raise MatrixError(f"{name}: {len(values)} numbers for {n} nodes")
    return tuple(_number(x, name) * unit for x in values)


def _row(data: dict[str, Any], name: str, n: int, unit: float) -> tuple[float, ...]:
    return _vector(data.get(name, 0), name, n, unit)


def _table(data: dict[str, Any], name: str, n: int, unit: float) -> tuple[tuple[float, ...], ...]:
    value = data.get(name, 0)
    rows = value if isinstance(value, list) else [value] * n
    if len(rows) != n:
        raise MatrixError(f"{name}: {len(rows)} rows for {n} nodes")
    return tuple(_vector(row, name, n, unit) for row in rows)
