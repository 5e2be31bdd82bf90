"""A later order for the same states goes on with what is under way; any other one replaces it."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hetpeer.averaging.effects import FetchState
from hetpeer.averaging.messages import TermView
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.peer.training.state_loading import StateLoading

LINE, LATER = TermView(term=1, view=0), TermView(term=1, view=1)
ORDER = FetchState(LINE, 6, {0: (), 1: ()}, {0: "zero", 1: "one"})
SPECS: Any = [SimpleNamespace(index=0), SimpleNamespace(index=1)]


class Loads:
    """Stands for the fetcher and the core: loads are done when they are told to."""

    def __init__(self) -> None:
        self.begun: list[FetchState] = []
        self.done = asyncio.Event()
        self.told: list[tuple[TermView, int, Any]] = []
        self.tasks = TaskSet(self.told.append)
        life = SimpleNamespace(loaded=lambda *what: self.told.append(what) or ())
        member: Any = SimpleNamespace(life=life)
        fetcher: Any = lambda: self  # noqa: E731
        self.loading = StateLoading(member, self.tasks, fetcher, list)
        self.loading.use(SPECS, None)

    async def load(self, order: FetchState, specs: Any) -> dict[int, str]:
        assert specs is SPECS
        self.begun.append(order)
        await self.done.wait()
        return dict(order.digests)

    async def end(self) -> None:
        self.done.set()
        await asyncio.sleep(0.01)
        await self.tasks.close()


async def test_an_order_for_the_same_states_in_a_new_view_goes_on():
    loads = Loads()
    for line in (LINE, LATER):
        loads.loading.begin(replace(ORDER, line=line))
        await asyncio.sleep(0.01)
    await loads.end()
    assert loads.begun == [ORDER]
    assert loads.told == [(LATER, 6, ORDER.digests)]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 7},
        {"digests": {0: "zero", 1: "another"}},
        {"digests": {0: "zero"}},
        {"origin": 2},
        {"line": TermView(term=1, view=0, cluster=2)},
    ],
)
async def test_any_other_order_replaces_it(change):
    loads, other = Loads(), replace(ORDER, **change)
    for order in (ORDER, other):
        loads.loading.begin(order)
        await asyncio.sleep(0.01)
    await loads.end()
    assert loads.begun == [ORDER, other]
    assert loads.told == [(other.line, other.version, other.digests)]


async def test_where_digests_are_not_known_a_version_says_too_little():
    loads, vague = Loads(), replace(ORDER, digests={})
    for line in (LINE, LATER):
        loads.loading.begin(replace(vague, line=line))
        await asyncio.sleep(0.01)
    await loads.end()
    assert len(loads.begun) == 2


async def test_nothing_goes_on_once_the_blocks_are_loaded_anew():
    loads = Loads()
    loads.loading.begin(ORDER)
    await asyncio.sleep(0.01)
    loads.loading.give_up()
    loads.loading.begin(replace(ORDER, line=LATER))
    await asyncio.sleep(0.01)
    await loads.end()
    assert len(loads.begun) == 2
    assert loads.told == [(LATER, 6, ORDER.digests)]
