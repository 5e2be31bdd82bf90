"""The figures of daemons at work, read as Prometheus reads them."""

import asyncio

import pytest

from tests.swarm.child import POLL_S, Child
from tests.swarm.swarm import Swarm, resign, scraped

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


async def at_work(child: Child) -> dict[tuple[str, ...], float]:
    """What `scraped` finds while the state is `training`: in part of each step it is another one."""
    while not (found := await scraped(child)).get(("hetpeer_state", "training")):
        await asyncio.sleep(POLL_S)
    return found


async def test_what_daemons_at_work_measure(swarm: Swarm) -> None:
    training = swarm.run.manifest.training.model_copy(update={"steps": 100_000})
    layouts = (((0, len(swarm.run.manifest.blocks)),),)
    swarm.run = resign(swarm.run, training=training, layouts=layouts)
    boss = await swarm.bootstrap("--dashboard", "0")
    one = swarm.volunteer("ada", "--dashboard", "0")
    await swarm.committed(4)  # what it has of three updates is in the fourth
    ours, theirs = await at_work(one), await at_work(boss)
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
    assert ours["hetpeer_transfer_month_bytes",] > 0
    assert ours["hetpeer_network_receive_bytes_total",] > 0
    assert (ours["hetpeer_held", "user"], ours["hetpeer_temperature_limit_celsius", "gpu"]) == (0, 83)
    assert ours["hetpeer_warning", "HP-GPU-004"] in (0, 1)
    assert theirs["hetpeer_warning", "HP-NET-015"] == 0
    assert theirs["hetpeer_log_records_total", "commit"] >= 3
    assert theirs["hetpeer_swarm_peers", "working"] == 1
    assert theirs["hetpeer_swarm_block_replicas", "0"] == 1
    assert theirs["hetpeer_credit",] > 0
    await swarm.left_in_order([one])
