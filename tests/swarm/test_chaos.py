"""A minute in which something happens to somebody all the time.

The long one, with figures, is `make chaos`.
"""

import asyncio
import signal

import psutil
import pytest

from hetpeer.peer.demo.demo_report import collect_evidence
from tests.swarm.child import Child
from tests.swarm.swarm import Swarm, resign
from tests.wanlab.chaos import KINDS, Chaos, homes
from tests.wanlab.lab import Lab, needs_lab

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

PEERS = 6
EVERY_S = 9.0
LATENCY_MS = (40, 80)
"""So that lines, and not the two processors of this machine, are what is waited for."""
LEASE_S = 10.0
ENDLESS = 100_000


class Homes:
    """The processes of a swarm by the nodes of its laboratory."""

    def __init__(self, swarm: Swarm) -> None:
        self.children: dict[int, Child] = {}
        self._swarm = swarm

    async def kill(self, node: int) -> None:
        self.children[node].signal(signal.SIGKILL)
        await self.children[node].ended()

    async def start(self, node: int) -> None:
        self.children[node] = (
            self._swarm.volunteer(f"v{node}", node=node) if node else await self._swarm.bootstrap()
        )

    def family(self, node: int) -> list[psutil.Process]:
        daemon = psutil.Process(self.children[node].pid)
        return [daemon, *daemon.children(recursive=True)]

    def worker(self, node: int) -> psutil.Process | None:
        return self.children[node].helpers().get("worker")


@pytest.mark.proof
@needs_lab
async def test_every_microbatch_counts_once_whatever_happens(swarm: Swarm) -> None:
    training = swarm.run.manifest.training.model_copy(update={"steps": ENDLESS})
    swarm.run = resign(swarm.run, training=training)
    with Lab(homes(PEERS, LATENCY_MS)) as lab:
        swarm.lab = lab
        homes_of = Homes(swarm)
        for node in range(PEERS + 1):
            await homes_of.start(node)
        await swarm.committed(3)
        chaos = Chaos(homes_of, lab, PEERS, LEASE_S)
        for _ in KINDS:
            chaos.strike()
            await asyncio.sleep(EVERY_S)
        await chaos.healed()
        assert {fault.kind for fault in chaos.faults} == set(KINDS)
        await swarm.committed(swarm.version + 3, within_s=150.0)
        coordinator, *volunteers = (homes_of.children[node] for node in range(PEERS + 1))
        assert all(child.status is None for child in (coordinator, *volunteers))
        coordinator.signal(signal.SIGINT)  # before the volunteers: or their farewells would take the run back
        assert await coordinator.ended() == 0, coordinator.said
        steps = swarm.version
        for child in volunteers:
            await homes_of.kill(int(child.name[1:]))
        collect_evidence(swarm.run, [child.home for child in volunteers])
    verdict = swarm.judged()
    assert (verdict.lost, verdict.duplicated, verdict.steps) == (0, 0, steps)
    swarm.exact_so_far()
