"""Hurts the peers of a swarm in the laboratory, one after the other, and mends them: benchmarks/chaos.py
and tests/swarm/test_chaos.py.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil

from tests.wanlab.lab import Lab

COORDINATOR = 0
"""The node it is at; volunteers are at those from 1 on."""
KINDS = ("kill", "kill", "kill worker", "freeze", "cut", "slow", "kill coordinator")
UPLINK_MBPS, SLOW_MBPS = 20.0, 1.0


class Victims(Protocol):
    """The processes at the nodes of the laboratory."""

    async def kill(self, node: int) -> None:
        """Its daemon, without a word."""

    async def start(self, node: int) -> None:
        """Again, where it was."""

    def family(self, node: int) -> Sequence[psutil.Process]:
        """Its processes, the daemon first."""

    def worker(self, node: int) -> psutil.Process | None:
        """Its compute worker, if there is one."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happened where, and when by the monotonic clock."""

    kind: str
    node: int
    at: float


class Chaos:
    """`kinds` come round in an order of `seed`; the volunteers are at the nodes 1 to `peers`, and have
    uplinks of UPLINK_MBPS.

    Who is frozen or has a slow uplink is so for two leases, who is cut off for one and a half.
    """

    def __init__(
        self,
        victims: Victims,
        lab: Lab,
        peers: int,
        lease_s: float,
        kinds: Sequence[str] = KINDS,
        seed: int = 0,
    ) -> None:
        self.faults: list[Fault] = []
        self._victims = victims
        self._lab = lab
        self._peers = peers
        self._lease_s = lease_s
        self._kinds = kinds
        self._random = random.Random(seed)
        self._turn: list[str] = []
        self._mending: set[asyncio.Task[None]] = set()
        self._hurt: set[int] = set()

    def strike(self) -> None:
        """The next fault; all kinds come round before one comes again, and nobody is hurt twice at a time."""
        if not self._turn:
            self._turn = list(self._kinds)
            self._random.shuffle(self._turn)
        kind = self._turn.pop()
        well = [node for node in range(1, self._peers + 1) if node not in self._hurt]
        node = COORDINATOR if kind == "kill coordinator" else self._random.choice(well)
        self.faults.append(Fault(kind, node, time.monotonic()))
        self._hurt.add(node)
        self._mending.add(asyncio.create_task(self._hurt_and_mend(kind, node)))

    async def healed(self) -> None:
        """Return when everybody is there again. Raises what went wrong with hurting or mending."""
        await asyncio.gather(*self._mending)

    async def _hurt_and_mend(self, kind: str, node: int) -> None:
        victims, lease_s, pause_s = self._victims, self._lease_s, self._random.uniform(1.0, 8.0)
        match kind:
            case "kill":
                await victims.kill(node)
                await asyncio.sleep(pause_s)
                await victims.start(node)
            case "kill worker":
                worker = victims.worker(node)
                if worker is not None:
                    worker.kill()
            case "freeze":
                family = victims.family(node)
                for process in family:
                    process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(2 * lease_s)
                for process in reversed(family):
                    process.send_signal(signal.SIGCONT)
            case "cut":
                self._lab.order(f"partition {node}")
                await asyncio.sleep(1.5 * lease_s)
                self._lab.order(f"heal {node}")
            case "slow":
                self._lab.order(f"uplink {node} {SLOW_MBPS}")
                await asyncio.sleep(2 * lease_s)
                self._lab.order(f"uplink {node} {UPLINK_MBPS}")
            case "kill coordinator":
                await victims.kill(COORDINATOR)
                await asyncio.sleep(pause_s / 4)
                await victims.start(COORDINATOR)
        self._hurt.discard(node)


def homes(peers: int, latency_ms: tuple[float, float] = (8, 30)) -> dict[str, object]:
    """A matrix: the coordinator in a data centre, everybody else at home, as far from each other as
    `latency_ms` says.
    """
    nodes = peers + 1
    choose = random.Random(peers)
    latency = [[0.0] * nodes for _ in range(nodes)]
    for one in range(nodes):
        for other in range(one):
            latency[one][other] = latency[other][one] = choose.uniform(*latency_ms)
    return {
        "nodes": nodes,
        "latency_ms": latency,
        "uplink_mbps": [1000.0] + [UPLINK_MBPS] * peers,
        "downlink_mbps": [1000.0] + [100.0] * peers,
        "queue_ms": 150,
    }
