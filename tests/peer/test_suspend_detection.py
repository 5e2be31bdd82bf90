"""Sleep of the machine, by given clocks."""

import asyncio

import pytest

from hetpeer.peer.limits import suspend_detection
from hetpeer.peer.limits.suspend_detection import Sleep, watch_forever


def test_time_that_passes_is_no_sleep() -> None:
    sleep = Sleep(100.0, 5000.0)
    assert sleep.look(101.0, 5001.0) == 0.0
    assert sleep.look(4000.0, 8900.0) == 0.0  # our process stood still, the machine did not


def test_each_sleep_counts_once() -> None:
    sleep = Sleep(100.0, 5000.0)
    assert sleep.look(101.0, 8601.0) == 3600.0
    assert sleep.look(102.0, 8602.0) == 0.0
    assert sleep.look(103.0, 8610.0) == 7.0


def test_clocks_that_are_read_one_after_the_other_give_no_negative_sleep() -> None:
    sleep = Sleep(100.0, 5000.0)
    assert sleep.look(101.00001, 5001.0) == 0.0


class Clock:
    """The boot clock jumps by what is left of `jumps` at each look; the other one stands still."""

    def __init__(self, *jumps: float) -> None:
        self.jumps = [0.0, *jumps]
        self.now = 0.0

    def monotonic(self) -> float:
        return 0.0

    def boottime(self) -> float:
        self.now += self.jumps.pop(0) if self.jumps else 0.0
        return self.now


async def test_only_who_slept_long_comes_back_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_detection, "LOOK_S", 0.0)
    clock, woken = Clock(0.0, 9.0, 0.0, 10.0, 3600.0), []
    both = asyncio.Event()

    async def wake() -> None:
        woken.append(clock.now)
        if len(woken) == 2:
            both.set()

    watching = asyncio.ensure_future(watch_forever(clock, wake))
    await asyncio.wait_for(both.wait(), 5.0)
    watching.cancel()
    assert woken == [19.0, 3619.0]
