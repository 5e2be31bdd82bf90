"""When adverts are published: now and then, at once when something in them matters, and never many at a
time.
"""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hetpeer.dht.discovery import LEFT, Advert
from hetpeer.peer.daemon.owner_wishes import DaemonState
from hetpeer.peer.daemon.volunteer_life import shown_as
from hetpeer.peer.training import self_advert
from hetpeer.peer.training.self_advert import anything, publish_forever, take_leave


class Told:
    """A roster that takes down what is published, and when."""

    def __init__(self) -> None:
        self.adverts: list[Advert] = []
        self.times: list[float] = []
        self.answers = True

    async def publish(self, advert: Advert, *, ttl_s: float) -> bool:
        self.adverts.append(advert)
        self.times.append(time.monotonic())
        if not self.answers:
            await asyncio.Event().wait()
        return True

    async def until(self, count: int) -> None:
        async with asyncio.timeout(30.0):
            while len(self.times) < count:
                await asyncio.sleep(0.005)


@pytest.fixture
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """An advert that nobody asked for comes too late for any test."""
    monkeypatch.setattr(self_advert, "PUBLISH_S", 600.0)


@pytest.mark.usefixtures("rarely")
async def test_what_matters_is_told_at_once_and_a_flood_of_it_in_turns() -> None:
    roster: Any = Told()
    step = 0
    publishing = asyncio.create_task(
        publish_forever(roster, lambda: Advert(role="coordinator", step=step), lambda: step, anything)
    )
    try:
        await roster.until(1)
        step = 1
        await roster.until(2)
        while len(roster.times) < 5:
            step += 1
            await asyncio.sleep(0.005)
    finally:
        publishing.cancel()
    assert [advert.step for advert in roster.adverts[:2]] == [0, 1]
    gaps = [later - before for before, later in zip(roster.times, roster.times[1:], strict=False)]
    assert min(gaps) >= self_advert.GAP_S


@pytest.mark.usefixtures("rarely")
async def test_nobody_looks_before_something_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_advert, "LOOK_S", 0.001)
    roster: Any = Told()
    step, looks = 0, 0
    happened = asyncio.Event()

    def look() -> int:
        nonlocal looks
        looks += 1
        return step

    async def happens() -> None:
        happened.clear()
        await happened.wait()

    publishing = asyncio.create_task(
        publish_forever(roster, lambda: Advert(role="volunteer", step=step), look, happens)
    )
    try:
        await roster.until(1)
        await asyncio.sleep(2 * self_advert.GAP_S)
        assert looks == 2, "before the advert, and once it may be followed by another"
        happened.set()
        async with asyncio.timeout(30.0):
            while looks < 3:
                await asyncio.sleep(0.005)
        assert len(roster.adverts) == 1, "it was nothing notable"
        step = 7
        happened.set()
        await roster.until(2)
    finally:
        publishing.cancel()
    assert roster.adverts[1].step == 7


async def test_what_does_not_matter_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_advert, "PUBLISH_S", 1.0)
    roster: Any = Told()
    publishing = asyncio.create_task(publish_forever(roster, lambda: Advert(role="volunteer")))
    await roster.until(3)
    publishing.cancel()
    assert roster.times[2] - roster.times[0] >= 1.8


@pytest.mark.parametrize("answers", [True, False])
async def test_who_leaves_says_so_and_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(self_advert, "LEAVE_S", 0.1)
    monkeypatch.setattr(self_advert, "reach_fields", lambda _node: {})
    roster: Any = Told()
    roster.answers = answers
    await asyncio.wait_for(take_leave(roster, roster, "volunteer"), 10.0)
    assert [(advert.role, advert.state) for advert in roster.adverts] == [("volunteer", LEFT)]


async def test_who_starts_its_worker_is_seen_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_advert, "reach_fields", lambda _node: {})
    roster: Any = Told()
    presence: Any = SimpleNamespace(roster=roster, node=SimpleNamespace(addresses=list))
    governing: Any = SimpleNamespace(settings=SimpleNamespace(node=SimpleNamespace(name="home")))
    async with shown_as(DaemonState.CHECKING, presence, governing):
        await roster.until(1)
    told = [(advert.name, advert.role, advert.state) for advert in roster.adverts]
    assert told == [("home", "volunteer", "checking")]
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1, "nothing is said any more"
