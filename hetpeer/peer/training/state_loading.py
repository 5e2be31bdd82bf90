"""Loading of the states that the core orders, one order at a time.

A later order replaces an earlier one, unless it asks for the same bits: then what was loaded counts, and what
is under way goes on. So a roll-back to the checkpoint that a backup is fetching costs it nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from hetpeer.averaging.effects import Effect, FetchState
from hetpeer.averaging.member.member import Member
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.peer.preparation.data_source import DataSource
from hetpeer.peer.preparation.state_fetcher import StateFetcher
from hetpeer.stages.graph.block_spec import BlockSpec


class StateLoading:
    """Carries out `FetchState` for `member` with what `fetcher` makes; the core hears of it by `perform`."""

    def __init__(
        self,
        member: Member,
        tasks: TaskSet,
        fetcher: Callable[[], StateFetcher],
        perform: Callable[[Iterable[Effect]], None],
    ) -> None:
        self._member = member
        self._tasks = tasks
        self._fetcher = fetcher
        self._perform = perform
        self._specs: Sequence[BlockSpec] = ()
        self._source: DataSource | None = None
        self._order: FetchState | None = None
        """The newest order, as long as it is under way."""
        self._loading: asyncio.Task[None] | None = None

    def use(self, specs: Sequence[BlockSpec], source: DataSource | None) -> None:
        """Load states of these blocks from now on, and their first data from `source`."""
        self._specs, self._source = specs, source

    def give_up(self) -> None:
        """End what is under way: the worker's blocks are about to be other ones."""
        if self._loading is not None:
            self._loading.cancel()
        self._order = self._loading = None

    def begin(self, order: FetchState) -> None:
        """Carry out `order` in place of an earlier one, or let that go on if it brings the same states."""
        earlier = self._order
        if earlier is None or not earlier.goes_on_as(order, [spec.index for spec in self._specs]):
            self.give_up()
            self._loading = self._tasks.spawn(self._load(order), name="loading of states")
        self._order = order

    async def _load(self, order: FetchState) -> None:
        """Fetch and load the states of our blocks and the first data; tell the core."""
        loading = self._fetcher().load(order, self._specs)
        warming = () if self._source is None else (self._source.warm_up(order.version),)
        digests, *_ = await asyncio.gather(loading, *warming)
        newest, self._order = self._order, None
        assert newest is not None
        self._perform(self._member.life.loaded(newest.line, newest.version, digests))
