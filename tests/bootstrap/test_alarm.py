"""The coordinator's alarm rings once, at the time that was named last."""

import asyncio
import math
import time

from hetpeer.bootstrap.service.alarm import Alarm
from hetpeer.dht.base.runtime import SystemClock

SOON_S = 0.02


async def rung(alarm_set, *, rings=1):
    """Times at which an alarm rings that `alarm_set` sets, until a timer that was set after it is over."""
    found, over = [], asyncio.Event()
    alarm = Alarm(SystemClock(), lambda: found.append(time.monotonic()))
    alarm_set(alarm, time.monotonic())
    asyncio.get_running_loop().call_later(10 * SOON_S, over.set)
    await over.wait()
    assert len(found) == rings
    return found


async def test_it_rings_at_its_time_and_once():
    begun = time.monotonic()
    (at,) = await rung(lambda alarm, now: [alarm.set(now + SOON_S), alarm.set(now + SOON_S)])
    assert at >= begun + SOON_S


async def test_a_time_replaces_the_one_before():
    begun = time.monotonic()
    (at,) = await rung(lambda alarm, now: [alarm.set(now + SOON_S), alarm.set(now + 3 * SOON_S)])
    assert at >= begun + 3 * SOON_S
    await rung(lambda alarm, now: [alarm.set(now + 1000.0), alarm.set(now + SOON_S)])


async def test_no_time_and_a_past_one_stop_it():
    await rung(lambda alarm, now: [alarm.set(now + SOON_S), alarm.set(math.inf)], rings=0)
    await rung(lambda alarm, now: [alarm.set(now + SOON_S), alarm.set(now - 1.0)], rings=0)
    await rung(lambda alarm, now: [alarm.set(now + SOON_S), alarm.stop()], rings=0)


async def test_the_same_time_may_be_named_again_once_it_has_rung():
    """As when a loop's timer was a little early."""
    found, again = [], asyncio.Event()

    class Once:
        late_s = 0.0

        def monotonic(self):
            return time.monotonic() - self.late_s

    clock = Once()

    def ring():
        found.append(clock.monotonic())
        if len(found) == 1:
            alarm.set(due)
        else:
            again.set()

    alarm = Alarm(clock, ring)
    due = clock.monotonic() + SOON_S
    alarm.set(due)
    clock.late_s = SOON_S / 2  # by this clock, the timer will be early
    async with asyncio.timeout(10):
        await again.wait()
    assert found[0] < due <= found[1]
