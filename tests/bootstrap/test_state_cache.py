"""What is given to many, and to those who take it slowly: one copy of a thing, and no more of all than
there is memory for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from hetpeer.bootstrap.storage import state_cache
from hetpeer.bootstrap.storage.state_cache import (
    AT_LEAST_S,
    FLOOR,
    FRESH_S,
    WINDOW_S,
    Borrower,
    NoRoomError,
    StateCache,
)
from hetpeer.dht.base.errors import ProtocolError

SIZE = 100


class Store:
    """Copies of SIZE bytes of whatever is asked for, but of what is nowhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        monkeypatch.setattr(state_cache, "MOST_COPIED", room * SIZE)
        monkeypatch.setattr(state_cache, "OF_THE_LARGEST", 0)
        monkeypatch.setattr(state_cache, "UNSEEN", SIZE)
        monkeypatch.setattr(state_cache, "STRANGERS", 1)
        self.taken: Counter[str] = Counter()
        self.absent: set[str] = set()
        self.here: list[str] = []
        self.most = self.made = 0
        self.lending = StateCache(self._find, len)
        self.cut: list[str] = []
        self.users: dict[str, AsyncExitStack] = {}

    @asynccontextmanager
    async def _find(self, name: str) -> AsyncIterator[bytes | None]:
        await asyncio.sleep(0)
        if name == "bad":
            raise ProtocolError("there is no such name")
        if "nowhere" in name or name in self.absent:
            yield None
            return
        self.here.append(name)
        self.made += 1
        self.most = max(self.most, len(self.here))
        try:
            yield bytes(SIZE)
        finally:
            self.here.remove(name)

    async def takes(self, user: str, name: str, *, known: bool = False) -> bool:
        """Whether `user` gets it; it is slow, so it has it until it is done, or cut."""
        stack = AsyncExitStack()

        def cut() -> None:
            self.cut.append(user)
            closing.append(asyncio.ensure_future(stack.aclose()))

        borrower = Borrower(cut, lambda: self.taken[user], known)
        try:
            data = await stack.enter_async_context(self.lending.lend(name, borrower))
        except NoRoomError:
            return False
        if data is None:
            await stack.aclose()
        else:
            self.users[user] = stack
        return data is not None

    async def ends(self, user: str) -> None:
        await self.users.pop(user).aclose()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


closing: list[asyncio.Future[None]] = []


def later(store: Store, seconds: float) -> None:
    """So long ago is whatever has begun."""
    for copy in store.lending._copies:
        copy.made_at -= seconds
        copy.lent_at -= seconds
        for one in copy.borrowers:
            one._since -= seconds


async def test_what_was_missing_may_be_there_for_the_next_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while somebody has not read yet that it was missing."""
    store = Store(monkeypatch, 4)
    store.absent.add("late")
    async with store.lending.lend("late", Borrower(lambda: None, lambda: 0, known=False)) as found:
        assert found is None
        assert store.lending.nbytes == 0
        store.absent.clear()
        assert await store.takes("another", "late")
    await store.ends("another")
    assert store.here == []


async def test_many_who_take_the_same_share_one_copy_that_goes_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store(monkeypatch, room=4)
    assert await asyncio.gather(*(store.takes(str(n), "state/0/5/1") for n in range(50))) == [True] * 50
    assert (store.made, store.here) == (1, ["state/0/5/1"])
    for number in range(50):
        await store.ends(str(number))
    assert store.here == []
    assert store.lending.nbytes == 0


async def test_a_copy_is_not_lent_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a roll-back a version of the same number is another one."""
    store = Store(monkeypatch, room=4)
    await store.takes("slow", "state/0/5/1")
    later(store, FRESH_S + 1)
    await store.takes("other", "state/0/5/1")
    assert store.made == 2


async def test_who_takes_old_versions_slowly_keeps_nobody_from_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an attacker does with each version, for hours: there is memory for some, and the last one always
    comes.
    """
    store = Store(monkeypatch, room=4)
    for version in range(30):
        assert await store.takes(f"attacker {version}", f"state/0/{version}/1")
    assert store.most <= 6
    assert await store.takes("honest", "state/0/29/1")
    assert "honest" not in store.cut


async def test_what_is_slow_gives_way_where_there_is_no_room_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store(monkeypatch, room=3)
    for number in range(3):
        assert await store.takes(f"slow {number}", f"file/{number}")
    assert not await store.takes("early", "file/x")
    assert not store.cut
    later(store, AT_LEAST_S + 1)
    assert await store.takes("late", "file/y")
    assert len(store.cut) == 1
    assert await store.takes("shared", "file/y"), "of what is here there is no more"


async def test_who_asks_for_what_is_nowhere_has_nobody_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch, room=2)
    for number in range(2):
        assert await store.takes(f"honest {number}", f"state/0/5/{number}")
    for name in ("state/0/nowhere/1", "nowhere", "state/0/9/nowhere"):
        assert not await store.takes("attacker", name)
    assert not store.cut
    with pytest.raises(ProtocolError):
        await Store(monkeypatch, room=2).takes("attacker", "bad")


async def test_who_gives_up_while_it_is_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch, room=2)
    taking = asyncio.ensure_future(store.takes("a", "file/1"))
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait([taking])
    await asyncio.sleep(0)
    assert store.lending.nbytes == 0
    assert await store.takes("b", "file/1")


async def test_slow_downloads_give_way_to_whoever_waits_and_quick_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four that hardly take anything once kept everybody else out for a quarter of an hour."""
    store = Store(monkeypatch, room=4)
    for number in range(4):
        assert await store.takes(f"slow {number}", f"state/0/5/{number}")
    assert not await store.takes("honest", "state/0/5/7"), "they have just begun"
    later(store, WINDOW_S)
    store.taken.update({f"slow {number}": int(FLOOR * WINDOW_S * 1.1) for number in (1, 2)})
    assert await store.takes("honest", "state/0/5/7")
    assert await store.takes("another", "state/0/5/8")
    assert not await store.takes("third", "state/0/5/9"), "the rest are quick enough"
    assert sorted(store.cut) == ["slow 0", "slow 3"]


async def test_strangers_share_a_part_and_make_way_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(monkeypatch, room=4)
    monkeypatch.setattr(state_cache, "STRANGERS", 2)
    assert await store.takes("stranger 0", "state/0/5/0")
    assert await store.takes("stranger 1", "state/0/5/1")
    assert not await store.takes("stranger 2", "state/0/5/2")
    for number in (3, 4):
        assert await store.takes(f"member {number}", f"state/0/5/{number}", known=True)
    assert not store.cut
    assert await store.takes("stranger 3", "state/0/5/3"), "what a member takes costs nothing more"
    for number in (5, 6):
        assert await store.takes(f"member {number}", f"state/0/5/{number}", known=True)
    assert store.cut == ["stranger 0", "stranger 1"]
    assert not await store.takes("member 7", "state/0/5/7", known=True), "members are as good as each other"
