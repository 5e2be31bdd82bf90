"""The figures of daemons at work, read as Prometheus reads them."""

import asyncio
import re
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.swarm.swarm import Child, Swarm, resign, until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

Samples = dict[tuple[str, ...], float]


async def figures(child: Child) -> Samples:
    """(name, labels…) → value."""
    await child.says("dashboard at ")
    (url,) = re.findall(r"dashboard at (http://[^/]+)/", child.said)

    def read() -> str:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    text = await asyncio.to_thread(read)
    return {
        (one.name, *one.labels.values()): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


async def test_what_daemons_at_work_measure(swarm: Swarm) -> None:
    training = swarm.run.manifest.training.model_copy(update={"steps": 100_000})
    layouts = (((0, len(swarm.run.manifest.blocks)),),)
    swarm.run = resign(swarm.run, training=training, layouts=layouts)
    boss = await swarm.bootstrap("--dashboard", "0")
    one = swarm.volunteer("ada", "--dashboard", "0")
    await swarm.committed(3)
    ours, theirs = await figures(one), await figures(boss)
    assert ours["hetpeer_state", "training"] == theirs["hetpeer_state", "training"] == 1
    assert (ours["hetpeer_coordinator_connected",], theirs["hetpeer_leading",]) == (1, 1)
    assert ours["hetpeer_step",] >= 3
    assert theirs["hetpeer_step",] >= 3
    assert 0 < ours["hetpeer_loss",] < 20
    assert ours["hetpeer_blocks",] == len(swarm.run.manifest.blocks)
    assert ours["hetpeer_microbatches_total",] >= 3 * training.microbatches
    for process in ("daemon", "worker", "p2pd"):
        assert ours["hetpeer_process_resident_memory_bytes", process] > 2**20
    for phase in ("forward", "backward"):
        assert ours["hetpeer_microbatch_duration_seconds_count", phase] >= 3 * training.microbatches
        assert ours["hetpeer_microbatch_duration_seconds_sum", phase] > 0
    assert ours["hetpeer_worker_seconds_total", "computes"] > 0
    assert ours["hetpeer_memory_limit_bytes",] > 0
    assert theirs["hetpeer_log_records_total", "commit"] >= 3
    assert theirs["hetpeer_swarm_peers", "working"] == 1
    assert theirs["hetpeer_swarm_block_replicas", "0"] == 1
    assert theirs["hetpeer_credit",] > 0

    credit: list[float] = []

    async def asked() -> None:
        """Nobody watches the page: that the metrics are read is enough."""
        while not credit:
            if ("hetpeer_credit",) in (found := await figures(one)):
                credit.append(found["hetpeer_credit",])
            await asyncio.sleep(0.5)

    asking = asyncio.create_task(asked())
    await until(lambda: bool(credit), "the volunteer knows its credit")
    await asking
    assert 0 < credit[0] <= (await figures(boss))["hetpeer_credit",]
    await swarm.left_in_order([one])
