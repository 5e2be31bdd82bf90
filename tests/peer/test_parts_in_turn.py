"""Parts of a reduce leave in turn: some to each reducer at a time, and none of a changed slot."""

from collections import Counter

from hetpeer.averaging import effects as e
from hetpeer.averaging.messages import TermView
from hetpeer.peer.training.parts_in_turn import AT_ONCE, PartsInTurn

STEP = e.StepId(TermView(term=1, view=0), 3)


class Exports:
    """What is exported, and the coroutines of `start`, run at once."""

    def __init__(self) -> None:
        self.seen: list[e.SendPart] = []
        self.free = {}
        self.parts = PartsInTurn(self.export, self.start)

    def export(self, step, part, free):
        assert step == STEP
        self.seen.append(part)
        self.free[part] = free

        async def nothing() -> None:
            pass

        return nothing()

    def start(self, work) -> None:
        try:
            work.send(None)
        except StopIteration:
            return
        raise AssertionError("it waits for something")

    def under_way(self):
        return Counter(part.shard.reducer for part in self.free)

    def arrived(self, part) -> None:
        self.free.pop(part)()


def part(index, reducer, plan=1, block=0, slot=0):
    return e.SendPart(e.Shard(plan, block, index, 10 * index, 10 * index + 10, reducer), slot)


def test_each_reducer_has_some_parts_at_a_time_in_order():
    exports, count = Exports(), 3 * AT_ONCE
    parts = [part(index, reducer) for index in range(count) for reducer in "ab"]
    for one in parts:
        exports.parts.send(STEP, one)
    assert exports.under_way() == {"a": AT_ONCE, "b": AT_ONCE}
    while of_a := [one for one in exports.free if one.shard.reducer == "a"]:  # b stands still
        exports.arrived(of_a[0])
        assert max(exports.under_way().values()) <= AT_ONCE
    left = [one.shard.index for one in exports.seen if one.shard.reducer == "a"]
    assert left == list(range(count))
    assert exports.under_way() == {"b": AT_ONCE}


def test_no_part_leaves_of_a_slot_that_has_changed():
    """What has left before is of the slot as it was: the worker carries out one command after the other."""
    exports = Exports()
    for index in range(AT_ONCE + 4):
        exports.parts.send(STEP, part(index, "a", block=index % 2))
    exports.parts.slot_changed(STEP, 0, 5)
    exports.parts.slot_changed(STEP, 1, 0)
    while exports.free:
        exports.arrived(next(iter(exports.free)))
    assert [one.shard.block for one in exports.seen[AT_ONCE:]] == [0, 0]


def test_parts_of_an_older_plan_or_of_a_step_that_is_over_stay():
    exports = Exports()
    for plan in (1, 2):
        for index in range(AT_ONCE + 1):
            exports.parts.send(STEP, part(index, "a", plan))
    assert len(exports.seen) == 2 * AT_ONCE
    for one in list(exports.free):
        if one.shard.plan == 1:
            exports.arrived(one)
    assert len(exports.seen) == 2 * AT_ONCE, "plan 1 is void"
    exports.parts.end_step(STEP)
    while exports.free:
        exports.arrived(next(iter(exports.free)))
    assert len(exports.seen) == 2 * AT_ONCE
