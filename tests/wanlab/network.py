"""The network itself, without sockets or clock: packets in with a time, packets out with a time.

A packet waits for its sender's line (the uplink it shares and the pair's own rate), travels for the latency,
and waits for the receiver's downlink. Lines are fluid: a packet of n bytes occupies one for n / rate seconds,
first come, first served; one that would wait longer than the queue is long is dropped. A GSO packet counts
the headers of its segments.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from tests.wanlab.matrix import Matrix

Packet = TypeVar("Packet")
Flow = tuple[int, bytes]
"""Protocol number and the four bytes of both ports, as the sender has them."""


@dataclass(slots=True)
class Counters:
    """What became of the packets; `late_us` is the worst delay that the router itself added."""

    forwarded: int = 0
    forwarded_bytes: int = 0
    queue_drops: int = 0
    loss_drops: int = 0
    cut_drops: int = 0
    refused: int = 0
    late_us: int = 0


class Network(Generic[Packet]):
    """The state of a network while it is used. Times are seconds of any one clock."""

    def __init__(self, matrix: Matrix, seed: int = 0) -> None:
        n = len(matrix)
        self.matrix = matrix
        self.counters = Counters()
        self.pair_bytes = [[0] * n for _ in range(n)]
        self._latency = [list(row) for row in matrix.latency_s]
        self._rate = [list(row) for row in matrix.rate]
        self._uplink, self._downlink = list(matrix.uplink), list(matrix.downlink)
        self._loss = [list(row) for row in matrix.loss]
        self._cut = [[False] * n for _ in range(n)]
        self._pair_free = [[0.0] * n for _ in range(n)]
        self._up_free, self._down_free = [0.0] * n, [0.0] * n
        self._flows: set[tuple[int, int, Flow]] = set()
        self._closed = set(matrix.no_inbound)
        self._travelling: list[tuple[float, int, int, int, bool, Packet]] = []
        self._number = 0
        self._random = random.Random(seed)

    # ── packets ─────────────────────────────────────────────────────────────────────────────────────────────

    def send(
        self, now: float, source: int, to: int, size: int, packet: Packet, flow: Flow | None = None
    ) -> None:
        """`packet` of `size` bytes leaves `source`; it comes out of `due` if nothing stops it."""
        if self._cut[source][to]:
            self.counters.cut_drops += 1
        elif self._closed and not self._admitted(source, to, flow):
            self.counters.refused += 1
        elif self._loss[source][to] and self._random.random() < self._loss[source][to]:
            self.counters.loss_drops += 1
        else:
            self.pair_bytes[source][to] += size
            self._queue(now, source, to, size, packet)

    def _admitted(self, source: int, to: int, flow: Flow | None) -> bool:
        """Remembers the flows that closed nodes open; only their answers get in."""
        if flow is None:
            return to not in self._closed
        protocol, ports = flow
        if source in self._closed:
            self._flows.add((source, to, flow))
        return to not in self._closed or (to, source, (protocol, ports[2:] + ports[:2])) in self._flows

    def _queue(self, now: float, source: int, to: int, size: int, packet: Packet) -> None:
        start = max(now, self._up_free[source], self._pair_free[source][to])
        if start - now > self.matrix.queue_s:
            self.counters.queue_drops += 1
            return
        end = start
        if self._uplink[source]:
            self._up_free[source] = end = start + size / self._uplink[source]
        if self._rate[source][to]:
            self._pair_free[source][to] = start + size / self._rate[source][to]
            end = max(end, self._pair_free[source][to])
        self._travel(end + self._latency[source][to], to, size, bool(self._downlink[to]), packet)

    def _travel(self, when: float, to: int, size: int, before_downlink: bool, packet: Packet) -> None:
        self._number += 1  # packets of one moment keep their order
        heapq.heappush(self._travelling, (when, self._number, to, size, before_downlink, packet))

    @property
    def next_due(self) -> float | None:
        """When `due` has something next."""
        return self._travelling[0][0] if self._travelling else None

    def due(self, now: float) -> Iterator[tuple[int, Packet]]:
        """The packets that have arrived by now, with the node at which they did."""
        travelling, counters = self._travelling, self.counters
        while travelling and travelling[0][0] <= now:
            when, _, to, size, before_downlink, packet = heapq.heappop(travelling)
            if before_downlink:
                start = max(when, self._down_free[to])
                if start - when > self.matrix.queue_s:
                    counters.queue_drops += 1
                    continue
                self._down_free[to] = start + size / self._downlink[to]
                self._travel(self._down_free[to], to, size, False, packet)
                continue
            counters.late_us = max(counters.late_us, int((now - when) * 1e6))
            counters.forwarded += 1
            counters.forwarded_bytes += size
            yield to, packet

    # ── changes ─────────────────────────────────────────────────────────────────────────────────────────────

    def obey(self, order: str) -> None:
        """Change the network. Raises ValueError for what is no order.

        `partition A` and `heal A` (one node from and to all), `cut A B` and `mend A B` (both ways), `latency
        A B MS` (both ways), `rate A B MBPS`, `uplink A MBPS`, `downlink A MBPS`, `loss A B SHARE` (one way),
        `loss SHARE` (all), `close A` and `open A` (whether it takes connections). Nodes are names or numbers.
        """
        word, *rest = order.split()
        n = range(len(self.matrix))
        match word, rest:
            case (("partition" | "heal"), [node]):
                for other in n:
                    self._set_cut(self._node(node), other, word == "partition")
            case (("cut" | "mend"), [one, other]):
                self._set_cut(self._node(one), self._node(other), word == "cut")
            case "latency", [one, other, ms]:
                a, b = self._node(one), self._node(other)
                self._latency[a][b] = self._latency[b][a] = float(ms) / 1e3
            case "rate", [one, other, mbps]:
                self._rate[self._node(one)][self._node(other)] = float(mbps) * 125e3
            case "uplink", [node, mbps]:
                self._uplink[self._node(node)] = float(mbps) * 125e3
            case "downlink", [node, mbps]:
                self._downlink[self._node(node)] = float(mbps) * 125e3
            case "loss", [one, other, share]:
                self._loss[self._node(one)][self._node(other)] = float(share)
            case "loss", [share]:
                self._loss = [[float(share)] * len(n) for _ in n]
            case "close", [node]:
                self._closed.add(self._node(node))
            case "open", [node]:
                self._closed.discard(self._node(node))
            case _:
                raise ValueError(f"no such order: {order}")

    def _node(self, name: str) -> int:
        if name in self.matrix.names:
            return self.matrix.names.index(name)
        if name.isdecimal() and int(name) < len(self.matrix):
            return int(name)
        raise ValueError(f"no such node: {name}")

    def _set_cut(self, one: int, other: int, cut: bool) -> None:
        if one != other:
            self._cut[one][other] = self._cut[other][one] = cut
