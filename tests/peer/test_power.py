"""A GPU's power: how a worker is slowed down until the limit is kept, who is held back where that does not
help, and a real worker that rests.
"""

import asyncio
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.peer.daemon.worker_start import pace_forever
from hetpeer.peer.limits.governor import (
    HELPLESS_S,
    LEAST_SHARE,
    POWER_OVER_S,
    Governor,
    Pacer,
    Readings,
    Reason,
)
from hetpeer.peer.limits.setting_layers import changed
from hetpeer.peer.limits.settings import WORKER, Settings
from hetpeer.stages.ipc.block_commands import WarmUp
from hetpeer.stages.ipc.compute import Compute, ComputeConfig

LOOK_S = 2.0


@given(st.floats(5.0, 60.0), st.floats(80.0, 600.0), st.floats(0.0, 1.0))
def test_a_card_is_brought_to_its_limit_and_no_further(idle: float, full: float, part: float) -> None:
    """A card that draws in proportion to how much it works; the limit is somewhere between what it takes
    at a tenth and at most.
    """
    lowest = idle + LEAST_SHARE * (full - idle)
    limit = lowest / 0.97 + part * (full - lowest)
    pacer, watts, drawn = Pacer(), full, []
    for look in range(120):
        assert not pacer.look(look * LOOK_S, watts, limit, held=False)
        watts = idle + pacer.share * (full - idle)
        drawn.append(watts)
    assert max(drawn[20:]) <= limit * 1.001
    assert min(drawn[60:]) >= min(full, 0.96 * limit)


def test_an_unknown_power_changes_nothing_and_no_limit_lets_it_work() -> None:
    pacer = Pacer()
    pacer.look(0.0, 300.0, 150.0, held=False)
    slowed = pacer.share
    assert slowed == 0.5, "not lower at once: what was measured may have been of others"
    pacer.look(2.0, None, 150.0, held=False)
    assert pacer.share == slowed
    pacer.look(4.0, 10.0, 150.0, held=True)
    assert pacer.share == slowed, "what a worker that is paused draws says nothing"
    pacer.look(6.0, 10.0, 150.0, held=False)
    assert slowed < pacer.share <= 1.1 * slowed
    pacer.look(8.0, 300.0, 0.0, held=False)
    assert pacer.share == 1.0


def test_who_cannot_help_it_by_resting_is_held() -> None:
    governor, wanted = Governor(), changed(Settings(), "limits.gpu_power_w", "100", "")
    now, found = 0.0, frozenset[Reason]()
    while governor.share > LEAST_SHARE:
        assert governor.look(now, Readings(minute=0, gpu_w=400.0), wanted) == frozenset()
        now += LOOK_S
    since = now
    while not found:
        found = governor.look(now, Readings(minute=0, gpu_w=120.0), wanted)
        now += LOOK_S
    assert found == {Reason.POWER}
    assert HELPLESS_S - LOOK_S <= now - since <= HELPLESS_S + 2 * LOOK_S
    clear = now
    while found:
        found = governor.look(now, Readings(minute=0, gpu_w=30.0), wanted)
        now += LOOK_S
    assert now - clear >= POWER_OVER_S
    assert governor.share == LEAST_SHARE, "it begins again slowly"
    governor.look(now, Readings(minute=0, gpu_w=300.0), Settings())
    assert governor.share == 1.0


@pytest.mark.alone
async def test_a_worker_rests_for_what_it_may_not_work() -> None:
    """By the kernel's account of its processor time; it goes on when nobody slows it down any more."""
    share = 0.3
    compute = await Compute.start(ComputeConfig(device="cpu", nice=0, arena_bytes=1 << 20), WORKER)
    process = psutil.Process(compute.workers[0].pid)

    async def work_forever() -> None:
        while True:
            await compute.submit(WarmUp())

    working = asyncio.create_task(work_forever())
    pacing = asyncio.create_task(pace_forever(compute, lambda: share))
    try:
        await asyncio.sleep(1.0)
        began, before = time.monotonic(), sum(process.cpu_times()[:2])
        await asyncio.sleep(4.2)  # six times as long as a turn
        spent = sum(process.cpu_times()[:2]) - before
        assert 0 < spent <= (share + 0.15) * (time.monotonic() - began)
        pacing.cancel()
        await asyncio.gather(pacing, return_exceptions=True)
        async with asyncio.timeout(60.0):
            await compute.submit(WarmUp())
    finally:
        pacing.cancel()
        working.cancel()
        await asyncio.gather(working, pacing, return_exceptions=True)
        await compute.close()


async def test_a_suspended_worker_is_not_woken_by_its_rest() -> None:
    compute = await Compute.start(ComputeConfig(device="cpu", nice=0, arena_bytes=1 << 20), WORKER)
    try:
        pacing = asyncio.create_task(pace_forever(compute, lambda: LEAST_SHARE))
        process = psutil.Process(compute.workers[0].pid)
        async with asyncio.timeout(60.0):
            while process.status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
        compute.suspend()
        pacing.cancel()
        await asyncio.gather(pacing, return_exceptions=True)
        assert process.status() == psutil.STATUS_STOPPED
    finally:
        await compute.close()
    compute.rest()
    compute.wake()  # of one that has ended: nothing
    with pytest.raises(psutil.NoSuchProcess):
        process.status()
