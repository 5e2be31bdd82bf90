"""Credit: an honest sender is never told that it sent too much, what is held is bounded, and whatever
waits goes on.
"""

import random
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.streams.abuse import OffenceError
from hetpeer.dht.streams.flow_control import (
    GrantBudget,
    GrantQueue,
    HeldBytes,
    LinkGrants,
    unpack,
    unpack_base,
)
from tests.amounts import examples

POOLS = 6
LARGEST = 10
BUDGETS = (GrantBudget(LARGEST, LARGEST), GrantBudget(LARGEST, 40), GrantBudget(LARGEST, 25))


@dataclass(frozen=True)
class Item:
    pool: int
    cost: int
    tag: object = None


class Line:
    """A sender with lanes that lose what was not acknowledged when they break, and a receiver that holds
    on to things.
    """

    def __init__(self, chance, budgets=BUDGETS, holding=None):
        self.chance = chance
        self.queue = GrantQueue()
        self.grants = LinkGrants(budgets, POOLS, holding or HeldBytes())
        self.taking = [self.grants.lane() for _ in range(3)]
        self.spent = [{} for _ in range(3)]
        self.under_way = [deque() for _ in range(3)]
        self.held = []
        self.arrived = 0
        self.hear()

    def hear(self):
        base, pools = self.grants.said()
        self.queue.granted(unpack_base(list(base)), unpack([*map(list, pools.items())]))

    def leave(self):
        while (item := self.queue.next()) is not None:
            lane = self.chance.randrange(3)
            self.spent[lane][item.pool] = self.spent[lane].get(item.pool, 0) + item.cost
            self.under_way[lane].append((item, self.spent[lane][item.pool]))

    def arrive(self, lane):
        if not self.under_way[lane]:
            self.taking[lane].offered(self.spent[lane])  # a beat
            self.taking[lane].settle()
            return
        item, total = self.under_way[lane][0]
        self.taking[lane].offered({item.pool: total})
        if self.chance.random() < 0.2:
            return  # the stream breaks in the middle of it: it will come again
        self.under_way[lane].popleft()
        self.taking[lane].claim(item.pool, item.cost)
        if self.chance.random() < 0.1:
            self.taking[lane].settle()  # not for us
        else:
            self.held.append((item, self.taking[lane].settle(item.pool, item.cost)))
        self.arrived += 1

    def forget(self, tag):
        self.queue.forget(tag)
        for lane in self.under_way:
            kept = [entry for entry in lane if entry[0].tag != tag]
            lane.clear()
            lane.extend(kept)

    def let_go(self):
        if self.held:
            _, back = self.held.pop(self.chance.randrange(len(self.held)))
            back()
            back()  # twice is no more than once

    def bytes_held(self, kind):
        return sum(item.cost for item, _ in self.held if min(item.pool, 2) == kind)


@given(st.integers(0, 1 << 32))
@examples(40)
def test_nobody_is_accused_nothing_overflows_and_everything_arrives(seed):
    chance = random.Random(seed)
    line = Line(chance)
    sent = forgotten = 0
    for _ in range(300):
        match chance.randrange(7):
            case 0 | 1:
                line.queue.add(Item(chance.randrange(POOLS), chance.randint(1, LARGEST), sent // 10))
                sent += 1
                line.leave()
            case 2 | 3:
                line.arrive(chance.randrange(3))
            case 4:
                line.let_go()
            case 5:
                line.hear()
                line.leave()
            case _:
                if chance.random() < 0.1:
                    before = len(line.queue) + sum(map(len, line.under_way))
                    line.forget(max(0, sent // 10 - 1))
                    forgotten += before - len(line.queue) - sum(map(len, line.under_way))
        assert line.bytes_held(0) <= LARGEST
        assert line.bytes_held(1) <= 40
        assert line.bytes_held(2) <= 25 + (POOLS - 3) * LARGEST
    for _ in range(400):
        for lane in range(3):
            line.arrive(lane)
        line.let_go()
        line.hear()
        line.leave()
    assert line.arrived == sent - forgotten
    assert not line.held


def test_a_pool_never_waits_for_another():
    """Far activations fill what there is for them; one that is nearer to the loss goes all the same, and a
    gradient.
    """
    line = Line(random.Random(1))
    for _ in range(50):
        line.queue.add(Item(5, 5))
    line.leave()
    for pool in (0, 1, 2, 3, 4):
        line.queue.add(Item(pool, LARGEST))
    line.leave()
    assert line.queue.pools == [5]


def test_lower_pools_go_first_and_a_pool_keeps_its_order():
    queue = GrantQueue()
    for item in (Item(2, 4, "a"), Item(2, 1, "b"), Item(0, 4, "c")):
        queue.add(item)
    assert queue.next() is None
    queue.granted((10, 10, 3), {})
    assert queue.next().tag == "c"
    assert queue.next() is None  # the small one does not pass the large one
    assert queue.is_short(2, 1)
    assert not queue.is_short(0, 6)
    queue.granted((10, 10, 4), {})
    queue.granted((0, 0, 0), {2: 2})  # an older word takes nothing back, but a pool's own number counts
    assert queue.next() is None
    queue.granted((0, 0, 0), {2: 5})
    assert [queue.next().tag, queue.next().tag] == ["a", "b"]


def test_who_sends_more_than_it_was_granted_is_found_before_its_payload():
    grants = LinkGrants(BUDGETS, POOLS, HeldBytes())
    one, other = grants.lane(), grants.lane()
    one.offered({0: LARGEST})
    with pytest.raises(OffenceError, match="beyond its grant"):
        other.offered({0: 1})
    with pytest.raises(OffenceError, match="not spent"):
        one.claim(0, LARGEST + 1)
    with pytest.raises(OffenceError, match="not spent"):
        one.claim(1, 1)
    one.settle(0, LARGEST)
    with pytest.raises(ProtocolError, match="less of a grant"):
        one.offered({0: LARGEST - 1})
    with pytest.raises(ProtocolError, match="no pool"):
        other.offered({POOLS: 1})


def test_a_sender_that_begins_again_and_again_holds_no_more():
    holding = HeldBytes()
    for _ in range(20):
        line = Line(random.Random(2), holding=holding)
        for pool in range(POOLS):
            for _ in range(20):
                line.queue.add(Item(pool, LARGEST))
        line.leave()
        for _ in range(200):
            line.arrive(line.chance.randrange(3))
            line.hear()
            line.leave()
    held = sum(holding.held.values())
    assert held <= 2 * (LARGEST + 40 + 25 + (POOLS - 3) * LARGEST)


def test_what_is_granted_stays_when_budgets_shrink():
    line = Line(random.Random(3))
    line.grants.resize((GrantBudget(1, 1),) * 3, POOLS)
    line.queue.add(Item(0, LARGEST))
    line.leave()
    assert not line.queue.pools
    line.under_way[0].extend(line.under_way[1])
    grants = LinkGrants((GrantBudget(),) * 3, POOLS, HeldBytes())
    assert grants.said() == ((0, 0, 0), {})
    grants.resize(BUDGETS, POOLS)
    assert grants.said()[0] == (LARGEST, LARGEST, LARGEST)


def test_the_sender_is_told_soon_of_what_matters():
    told = []
    grants = LinkGrants((GrantBudget(10, 80),), 1, HeldBytes(), lambda: told.append(1))
    lane = grants.lane()
    lane.offered({0: 1})
    grants.said()
    told.clear()
    back = lane.settle(0, 1)
    back()
    assert not told  # a byte of eighty can wait for the next beat
    lane.offered({0: 41})
    lane.settle(0, 40)()
    assert told


@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.floats(), lambda inner: st.lists(inner, max_size=4)
    )
)
def test_nonsense_is_a_protocol_error(data):
    for read in (unpack, unpack_base):
        try:
            read(data)
        except ProtocolError:
            continue
