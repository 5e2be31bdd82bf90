"""One plan at one holder: sets of parts, sums in cover order, exactly the cover or nothing."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import (
    COPY,
    STATE,
    Inspect,
    InspectSlot,
    Land,
    Look,
    SendPart,
    SendResult,
    Shard,
    SlotSum,
    SumParts,
)
from hetpeer.averaging.reduce.holder_reduce import NEWS, Reduction
from hetpeer.averaging.reduce.reduce_shards import (
    AT_ONCE,
    LENGTH,
    PIECES,
    SHORTEST,
    SPARSE_LENGTH,
    in_turns,
    length_of,
    shards_of,
)
from hetpeer.averaging.reduce.tied_parameters import Tie, Ties
from hetpeer.stages.block.fingerprint import KEY_BYTES
from hetpeer.stages.pipeline.effects import Release

SIZES = {0: 10, 1: 7}


def cover(block=0, slots=(("a", (0, 1)), ("b", (2,))), reducers=(("a", 1), ("b", 1)), receivers=("a", "b")):
    return m.Cover(block=block, slots=slots, reducers=reducers, receivers=receivers)


def reduction(me="a", covers=None):
    plan = m.Plan(line=m.TermView(term=1, view=0), step=0, plan=3, covers=covers or (cover(),))
    return Reduction(me, plan, SIZES, Ties())


def test_what_goes_to_whom_is_what_is_sent():
    """Parts to reducers, and sums of ours to everybody who holds the block: as the effects have it."""
    slots = (("a", (0, 1)), ("b", (2,)), ("c", (3,)))
    plan_of = cover(slots=slots, reducers=(("a", 3), ("b", 1)), receivers=("a", "b", "c", "d"))
    sent = Counter()
    one = reduction("a", (plan_of,))
    for effect in one.start(4, {0: frozenset({0, 1})}):
        sent[effect.shard.reducer] += effect.shard.end - effect.shard.begin
        if effect.shard.reducer == "a":
            *results, _ = one.summed(effect.shard, "sum")
            for result in results:
                sent[result.to] += result.shard.end - result.shard.begin
    del sent["a"]
    assert one.outgoing() == sent == {"b": 3 + 7, "c": 7, "d": 7}
    assert reduction("d", (plan_of,)).outgoing() == {}, "it has no sum, and reduces nothing"


@given(st.integers(0, 10_000), st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 5000))
def test_shards_cut_the_gradient_completely_and_by_the_shares(elements, shares, length):
    reducers = tuple((str(n), share) for n, share in enumerate(shares))
    shards = shards_of(1, cover(reducers=reducers), elements, length)
    assert (shards[0].begin, shards[-1].end) == (0, elements)
    assert all(one.end == other.begin for one, other in pairwise(shards))
    assert [shard.index for shard in shards] == list(range(len(shards)))
    for name, share in reducers:
        own = [shard.end - shard.begin for shard in shards if shard.reducer == name]
        assert abs(sum(own) - elements * share / sum(shares)) <= 1
        assert 1 <= len(own) <= PIECES
        assert len(own) == PIECES or max(own) <= length
        assert len(own) == 1 or max(own) - min(own) <= 1


def test_the_first_shards_of_many_reducers_arrive_as_early_as_those_of_a_few():
    """A line carries one shard to each of them before the first is there: as many bytes, however many they
    are.
    """
    for count in (1, AT_ONCE, 50, 100):
        many = tuple(map(str, range(count)))
        for one in (
            cover(reducers=tuple((peer, 1) for peer in many), receivers=("a",)),
            cover(reducers=(("a", 1),), receivers=many),
        ):
            assert count * (length_of(one) or LENGTH) <= AT_ONCE * LENGTH
    assert length_of(cover()) == 0, "as usual"
    said = cover().model_copy(update={"length": 3})
    assert [shard.length for shard in shards_of(1, said, 10, 100)] == [2, 3, 2, 3]
    assert length_of(cover(receivers=tuple(map(str, range(1000))))) == SHORTEST


def test_shards_are_sent_to_all_reducers_in_turn():
    shards = shards_of(1, cover(reducers=(("a", 3), ("b", 1))), 40, 10)
    assert [(shard.begin, shard.reducer) for shard in in_turns(shards)] == [
        (0, "a"),
        (30, "b"),
        (10, "a"),
        (20, "a"),
    ]


def test_a_holder_sends_its_slot_only_if_it_holds_exactly_what_is_named():
    assert reduction().start(4, {0: frozenset({0, 1})}) == [
        SendPart(Shard(3, 0, 0, 0, 5, "a"), 4),
        SendPart(Shard(3, 0, 1, 5, 10, "b"), 4),
    ]
    assert reduction().start(4, {0: frozenset({0, 1, 9})}) == []
    assert reduction().start(4, {0: frozenset({0})}) == []
    assert reduction().start(None, {}) == []
    assert reduction("c").start(4, {0: frozenset({0, 1})}) == []


MANY = m.Cover(
    block=0,
    slots=(("a", (0,)), ("c", (1,))),
    reducers=(("a", 1), ("b", 1), ("c", 1)),
    receivers=("a", "b", "c"),
)


def by_all(me, *, closely=(), ties=()):
    """A plan of movements of two clusters, a and b being holders of the first."""
    line = m.TermView(term=1, view=0)
    plan = m.Plan(line=line, step=0, plan=3, covers=(MANY,), closely=closely)
    core = Reduction(me, plan, {0: SPARSE_LENGTH + 5}, Ties(), by_all=Ties(ties))
    return core, core.start(STATE, {0: frozenset((0 if me in "ab" else 1,))})


def test_parts_of_movements_go_to_all_who_add_them_up_themselves():
    """And nobody sends sums."""
    borders = [(0, SPARSE_LENGTH), (SPARSE_LENGTH, SPARSE_LENGTH + 5)]
    core, effects = by_all("a")
    assert {(s.shard.begin, s.shard.end, s.shard.reducer) for s in effects} == {
        (*border, to) for border in borders for to in "abc"
    }
    assert len({s.shard.index for s in effects}) == 6
    assert core.outgoing() == {"b": SPARSE_LENGTH + 5, "c": SPARSE_LENGTH + 5}
    other, none = by_all("b")
    assert none == []
    assert other.missing() == (set(), {"a", "c"})
    theirs = [s.shard for s in effects if s.shard.reducer == "b"]
    assert other.part(0, effects[0].shard.index, "a", "for a") == [Release("for a")], "it is for another"
    for shard in theirs:
        assert other.part(0, shard.index, "c", f"c {shard.index}") == []
        (sums,) = other.part(0, shard.index, "a", f"a {shard.index}")
        assert (sums.holders, sums.shared, sums.closely) == (("a", "c"), False, False), "in the plan's order"
        results = [e for e in other.summed(shard, "sum") if isinstance(e, SendResult)]
        assert [result.to for result in results] == ["b"]
        *_, last = other.result(0, shard.index, "b", f"sum {shard.index}", shard.length)
    assert isinstance(last, Inspect)
    assert last.shards == tuple(f"sum {shard.index}" for shard in theirs)


def test_a_shard_of_movements_is_of_one_tied_parameter_or_of_none():
    """So each block that shares it encodes it alike, wherever it lies there."""
    core, _ = by_all("a", ties=(Tie(uses=((0, 7, 90), (3, 0, 83))),))
    shards = [(shard.begin, shard.end) for shard in core._shards[0] if shard.reducer == "c"]
    assert shards == [(0, 7), (7, 90), (90, SPARSE_LENGTH + 5)]


def test_who_looks_closely_says_what_came_from_whom():
    core, _ = by_all("b", closely=(0,))
    shards = [shard for shard in core._shards[0] if shard.reducer == "b"]
    looks = {"a": [Look("a0", True), Look("a1", True)], "c": [Look("c0", True), Look("c1", False)]}
    for piece, shard in enumerate(shards):
        core.part(0, shard.index, "a", "x")
        (sums,) = core.part(0, shard.index, "c", "y")
        assert sums.closely
        core.summed(shard, "sum", (), [looks[holder][piece] for holder in sums.holders])
        *_, last = core.result(0, shard.index, "b", "sum", shard.length)
    assert not last.closely, "the parts are looked at, and not the sums"
    core.inspected(VOTE, "whole")
    words = {word.reducer: (word.of, word.finite) for word in core.received}
    assert words == {"a": (0, True), "c": (0, False)}
    assert len({word.digest for word in core.received}) == 2


ALONE = cover(slots=(("a", (0, 1)),), reducers=(("a", 1),), receivers=("a",))
IDS = {0: frozenset({0, 1})}
VOTE = m.BlockVote(block=0, digest="d", squared_norm=1.0, finite=True)


def alone(covers=(ALONE,), ties=(), slot=4, **plan):
    """Effects of a plan at a holder whose slot has all ids of block 0."""
    order = m.Plan(line=m.TermView(term=1, view=0), step=0, plan=3, covers=covers, **plan)
    core = Reduction("a", order, SIZES, Ties(ties))
    return core, core.start(slot, IDS)


def test_a_slot_that_is_the_whole_sum_is_inspected_where_it_lies():
    core, effects = alone()
    assert effects == [InspectSlot(3, 0, 4)]
    core.inspected(VOTE, SlotSum(4))
    assert (core.complete, core.gradient(0)) == (True, SlotSum(4))
    assert core.abandon() == [], "there is nothing to release"
    assert core.sums([0]) == {}, "nobody gave us a sum of it"
    assert alone()[0].start(4, {0: frozenset({0})}) == [], "other ids than named"


@pytest.mark.parametrize(
    "more",
    [
        {"covers": (ALONE.model_copy(update={"receivers": ("a", "b")}),)},
        {"covers": (ALONE.model_copy(update={"receivers": ("b",)}),)},
        {"covers": (ALONE.model_copy(update={"observers": ("b",)}),)},
        {"covers": (ALONE.model_copy(update={"slots": (("a", (0, 1)), ("b", (2,)))}),)},
        {"covers": (ALONE.model_copy(update={"reducers": (("a", 1), ("b", 1))}),)},
        {"ties": (Tie(uses=((0, 0, 4), (1, 0, 4))),)},
        {"closely": (0,)},
        {"marks": (m.Mark(block=0, begin=0, end=1, key=bytes(KEY_BYTES)),)},
        {"slot": STATE},
        {"slot": COPY},
    ],
)
def test_a_sum_that_concerns_others_is_sent_as_parts(more):
    _, effects = alone(**more)
    assert effects
    assert {type(effect) for effect in effects} == {SendPart}


def test_a_slot_that_changes_is_no_sum_any_more():
    core, _ = alone()
    core.slot_changed(0, 5)
    core.slot_changed(1, 4)
    core.inspected(VOTE, SlotSum(4))
    assert core.matches({0: "d"}, [0]), "another slot, and another block"
    core.slot_changed(0, 4)
    assert not core.complete
    assert not core.matches({0: "d"}, [0])
    core.inspected(VOTE, SlotSum(4))
    assert not core.complete, "it was inspected before the change"


def test_parts_are_a_set_summed_in_the_order_of_the_cover():
    core = reduction()
    assert core.part(0, 0, "b", "from b") == []
    assert core.part(0, 0, "b", "again") == [Release("again")]
    (summing,) = core.part(0, 0, "a", "from a")
    assert summing == SumParts(Shard(3, 0, 0, 0, 5, "a"), ("from a", "from b"), holders=("a", "b"))
    assert core.part(0, 0, "a", "late") == [Release("late")]
    effects = core.summed(summing.shard, "sum")
    assert [e.to for e in effects if isinstance(e, SendResult)] == ["a", "b"]
    assert effects[:2] == [Release("from b"), Release("from a")]
    assert effects[-1] == Release("sum"), "receivers get shares of it"


def test_a_sum_that_nobody_else_gets_need_not_be_written_for_others():
    alone = reduction(covers=(cover(receivers=("a",)),))
    alone.part(0, 0, "a", "from a")
    assert [x.shared for x in alone.part(0, 0, "b", "from b")] == [False]
    core = reduction()
    core.part(0, 0, "a", "from a")
    assert [x.shared for x in core.part(0, 0, "b", "from b")] == [True]


def test_parts_that_are_not_ours_to_sum_are_released():
    core = reduction()
    for block, index, holder in ((0, 1, "a"), (0, 7, "a"), (5, 0, "a"), (0, 0, "stranger")):
        assert core.part(block, index, holder, "x") == [Release("x")]


def test_results_count_once_and_from_their_reducer_only():
    core = reduction()
    for block, index, sender in ((0, 0, "b"), (0, 9, "a"), (4, 0, "a")):
        assert core.result(block, index, sender, "x", 5) == [Release("x")]
    for length in (0, 1, 4, 6, 10):
        assert core.result(0, 1, "b", "x", length) == [Release("x")]
    assert core.missing()[0] == {"b"}, "who gave a sum of another length is named"
    first, second = (Shard(3, 0, index, begin, begin + 5, "ab"[index]) for index, begin in ((0, 0), (1, 5)))
    assert core.result(0, 1, "b", "second", 5) == [Land(second, "second", 0, 10)]
    assert core.result(0, 1, "b", "again", 5) == [Release("again")]
    landed, inspect = core.result(0, 0, "a", "first", 5)
    assert (landed, inspect) == (Land(first, "first", 0, 10), Inspect(3, 0, ("first", "second")))


def test_the_vote_is_complete_when_every_block_of_ours_was_inspected():
    other = cover(1, receivers=("b",))
    core = reduction(covers=(cover(), other))
    assert not core.complete
    core.inspected(m.BlockVote(block=0, digest="d", squared_norm=1.0, finite=True), "gradient")
    assert core.complete
    assert core.matches({0: "d", 1: "?"}, [0])
    assert not core.matches({0: "e"}, [0])
    assert not core.matches({0: "d"}, [0, 1])


def test_of_a_block_that_is_looked_at_closely_it_is_known_what_came_from_whom():
    plan = m.Plan(line=m.TermView(term=1, view=0), step=0, plan=3, covers=(cover(),), closely=(0,))
    core = Reduction("a", plan, SIZES, Ties(), length=3)
    for shard, handle in zip(shards_of(3, cover(), 10, 3), "wxyz", strict=True):
        _, *inspect = core.result(0, shard.index, shard.reducer, handle, shard.length)
    assert inspect == [Inspect(3, 0, tuple("wxyz"), closely=True)]
    vote = m.BlockVote(block=0, digest="d", squared_norm=1.0, finite=True)
    looks = [Look(digest, finite=digest != "4") for digest in "1234"]
    core.inspected(vote, "gradient", looks)
    assert [(one.of, one.reducer, one.finite) for one in core.received] == [(0, "a", True), (0, "b", False)]
    other = Reduction("a", plan, SIZES, Ties(), length=3)
    other.inspected(vote, "gradient", [*looks[:3], Look("5", finite=True)])
    assert other.received[0] == core.received[0]
    assert other.received[1].digest != core.received[1].digest


def test_what_is_tied_to_a_block_is_looked_at_with_it():
    ties = Ties((Tie(uses=((0, 0, 4), (1, 0, 4))),))
    covers = (cover(), cover(1, receivers=("b",)).model_copy(update={"observers": ("a",)}))
    plan = m.Plan(line=m.TermView(term=1, view=0), step=0, plan=3, covers=covers, closely=(0,))
    core = Reduction("a", plan, SIZES, ties)
    lengths = {b: [shard.length for shard in shards_of(3, covers[b], SIZES[b])] for b in SIZES}
    for block, index, sender in ((0, 0, "a"), (0, 1, "b"), (1, 0, "a"), (1, 1, "b")):
        landed, *inspect = core.result(block, index, sender, f"{block} {index}", lengths[block][index])
    assert (landed.begin, landed.end) == (0, 7), "both shards of block 1 have tied elements"
    (work,) = inspect
    vote = m.BlockVote(block=0, digest="d", squared_norm=1.0, finite=True)
    core.inspected(vote, "gradient", [Look(str(number), finite=True) for number, _ in enumerate(work.pieces)])
    assert {(one.block, one.of, one.reducer) for one in core.received} >= {
        (0, 0, "a"),
        (0, 0, "b"),
        (0, 1, "a"),
    }


def test_what_is_missing_is_named_by_whose_it_is():
    core = reduction()
    assert core.missing() == ({"b"}, {"b"})
    core.result(0, 1, "b", "sum of b", 5)
    assert core.missing() == (set(), {"b"})
    core.part(0, 0, "b", "from b")
    assert core.missing() == (set(), set())


def test_a_plan_that_is_void_lets_its_shards_go():
    core = reduction()
    core.part(0, 0, "b", "from b")
    core.result(0, 1, "b", "sum of b", 5)
    core.inspected(VOTE, "gradient")
    assert core.abandon() == [Release("from b"), Release("sum of b"), Release("gradient")]
    assert core.abandon() == []


def test_sums_of_others_blocks_go_when_all_is_inspected_and_ours_stay():
    ties = Ties((Tie(uses=((0, 0, 4), (1, 0, 3))),))
    covers = (cover(), cover(1, receivers=("b",)).model_copy(update={"observers": ("a",)}))
    plan = m.Plan(line=m.TermView(term=1, view=0), step=0, plan=3, covers=covers)
    core = Reduction("a", plan, SIZES, ties)
    core.result(0, 0, "a", "ours", 5)
    (landed,) = core.result(1, 0, "a", "theirs", 3)
    assert (landed.begin, landed.end) == (0, 3), "the other shard of block 1 is of no use here"
    assert core.release_observed() == [Release("theirs")]


def test_what_arrives_is_news_now_and_then():
    plan = m.Plan(line=m.TermView(term=1, view=0), step=0, plan=3, covers=(cover(),))
    core = Reduction("a", plan, SIZES, Ties(), length=1)
    assert not core.has_news()
    core.result(0, 4, "b", "wrong reducer's", 5)
    assert not core.has_news()
    for index in range(NEWS):
        core.part(0, index, "b", "from b")
        assert core.has_news() == (index == NEWS - 1)
    core.part(0, 0, "b", "again")
    assert not core.has_news()
