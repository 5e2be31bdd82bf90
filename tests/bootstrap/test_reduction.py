"""Plans and votes of a reduce."""

import pytest

from hetpeer.averaging.messages import BlockVote, Missed, Received, Reducing, TermView, Vote
from hetpeer.averaging.reduce.reduce_shards import LENGTH
from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs
from hetpeer.bootstrap.coordinator.commits import group_squares
from hetpeer.bootstrap.coordinator.reduction import MAX_PLANS, Reduce
from hetpeer.bootstrap.state.effects import CoordinatorConfig
from hetpeer.bootstrap.state.timeouts import AdaptiveTimeouts
from hetpeer.bootstrap.trust.reduce_complaints import ReduceComplaints
from hetpeer.dht.base.errors import ProtocolError
from tests.bootstrap.court import CONFIG as SETTINGS

CONFIG = CoordinatorConfig(**(SETTINGS | {"reduce_s": 10.0}))

LINE = TermView(term=1, view=0)
ROSTER = {"a": (0, 2), "b": (0, 2)}
SUMS = {0: [("a", (0, 1))], 1: [("a", (0,)), ("b", (1,))]}


def reduce_of(known: DisputedPairs | None = None, timeouts: AdaptiveTimeouts | None = None) -> Reduce:
    complaints = ReduceComplaints(known or DisputedPairs(), CONFIG.ties)
    return Reduce(CONFIG, {}, complaints, timeouts or AdaptiveTimeouts())


def vote(plan=1, digests=("x", "y"), *, finite=True):
    blocks = tuple(
        BlockVote(block=b, digest=digest, squared_norm=1.0, finite=finite) for b, digest in enumerate(digests)
    )
    return Vote(line=LINE, step=0, plan=plan, blocks=blocks)


def reduce():
    one = reduce_of()
    told = one.make(SUMS, ROSTER, 0.0)
    assert told.keys() == ROSTER.keys()
    return one


def test_a_plan_names_sums_in_the_callers_order():
    told = reduce_of().make(SUMS, ROSTER, 0.0)
    assert [cover.slots for cover in told["b"]] == [(("a", (0, 1)),), (("a", (0,)), ("b", (1,)))]
    assert {cover.receivers for cover in told["b"]} == {("a", "b")}


def test_who_only_sends_is_told_of_that_block_alone():
    told = reduce_of().make(
        {0: [("c", (0,))], 1: [("b", (0,))]}, {"a": (0, 1), "b": (1, 2), "c": (1, 2)}, 0.0
    )
    assert [c.block for c in told["a"]] == [0]
    assert [c.block for c in told["c"]] == [0, 1]
    assert told["b"][0].receivers == ("b", "c")


def test_all_votes_alike_decide_and_an_older_plans_do_not_count():
    one = reduce()
    one.vote("a", vote(), ROSTER, 1.0)
    one.make(SUMS, ROSTER, 1.0)
    assert not one.vote("b", vote(plan=1), ROSTER, 1.0)
    one.vote("b", vote(plan=2), ROSTER, 1.0)
    assert one.decision is None
    one.vote("a", vote(plan=2), ROSTER, 1.0)
    assert one.decision is not None
    assert one.decision[1].digest == "y"


def test_votes_of_other_blocks_than_ones_own_do_not_count():
    one = reduce()
    one.vote("a", vote(), ROSTER, 1.0)
    one.vote("b", vote(digests=("x",)), ROSTER, 1.0)
    assert one.decision is None


def test_a_vote_on_a_block_twice_is_an_offence():
    """One vote agrees with the others and one differs: the liar could not be found."""
    one, twice = reduce(), vote(digests=("x", "y"))
    also = twice.blocks[1].model_copy(update={"digest": "z"})
    with pytest.raises(ProtocolError):
        one.vote("a", twice.model_copy(update={"blocks": (*twice.blocks, also)}), ROSTER, 1.0)
    assert not one.votes


def test_differing_votes_ask_for_another_plan_whose_votes_say_what_has_come_from_whom():
    one = reduce()
    one.vote("a", vote(), ROSTER, 1.0)
    assert one.vote("b", vote(digests=("x", "z")), ROSTER, 1.0)
    one.make(SUMS, ROSTER, 1.0)
    assert one.closely == (1,)
    for peer in "ab":
        assert not one.vote(peer, vote(plan=2), ROSTER, 1.0)
    assert one.decision is not None, "they agree this time, whatever they say of it"


def test_who_is_in_dispute_adds_up_nothing_and_only_if_others_can():
    known = DisputedPairs()
    known.add([frozenset("ab")])
    told = reduce_of(known).make(SUMS, ROSTER | {"c": (0, 2)}, 0.0)
    assert [[peer for peer, _ in cover.reducers] for cover in told["c"]] == [["c"], ["c"]]
    told = reduce_of(known).make(SUMS, ROSTER, 0.0)
    assert {peer for cover in told["a"] for peer, _ in cover.reducers} <= {"a", "b"}


def of_movements(known: DisputedPairs | None = None) -> Reduce:
    complaints = ReduceComplaints(known or DisputedPairs(), CONFIG.ties)
    return Reduce(CONFIG, {"a": 1.0, "b": 9.0}, complaints, AdaptiveTimeouts(), by_all=True)


def test_movements_are_added_up_by_all_whatever_their_lines_and_disputes():
    """Nobody adds up for another, so nobody is left out."""
    known, roster = DisputedPairs(), ROSTER | {"c": (0, 2)}
    known.add([frozenset("ab")])
    told = of_movements(known).make(SUMS, roster, 0.0)
    assert {cover.reducers for cover in told["a"]} == {(("a", 1), ("b", 1), ("c", 1))}
    assert {cover.length for cover in told["a"]} == {0}


def test_who_sends_one_movement_to_some_and_another_to_others_is_named():
    one, roster = of_movements(), ROSTER | {"c": (0, 2)}
    sums = {0: [("a", (0,)), ("b", (1,)), ("c", (2,))]}
    one.make(sums, roster | dict.fromkeys(roster, (0, 1)), 0.0)
    roster = dict.fromkeys("abc", (0, 1))

    def votes(plan):
        for peer, digest in zip("abc", "xxy", strict=True):
            words = tuple(
                Received(block=0, of=0, reducer=sender, digest=digest if sender == "b" else "0", finite=True)
                for sender in "abc"
            )
            word = vote(plan=plan, digests=(digest,)).model_copy(update={"received": words})
            again = one.vote(peer, word, roster, 1.0)
        return again

    assert votes(1), "another plan, whose votes say what came from whom"
    one.make(sums, roster, 1.0)
    assert one.closely == (0,)
    assert votes(2), "b's word is against c's"
    assert [news["pairs"] for news in one.complaints.news()] == [[["b", "c"]]]
    one.make(sums, roster, 2.0)
    votes(3)
    assert one.complaints.to_fence().keys() <= {"b", "c"}


def test_progress_counts_all_parts_that_come_to_each():
    one = of_movements()
    one.make(SUMS, ROSTER, 0.0)
    shards = [-(-CONFIG.costs[block].elements // LENGTH) for block in SUMS]
    due = sum(1 + (len(SUMS[block]) + 1) * count for block, count in enumerate(shards))
    assert one._shards == {"a": due, "b": due}


def test_what_was_missed_counts_for_the_plan_that_ran_out_of_time_alone():
    one = reduce()
    roster = ROSTER | {"c": (0, 2)}
    one.make(SUMS, roster, 1.0)
    missed = Missed(line=LINE, step=0, plan=1, sums=("a",))
    one.missed("c", missed)
    assert one.ran_out()
    one.make(SUMS, roster, 2.0)
    one.missed("c", missed.model_copy(update={"plan": 2}))
    one.ran_out()
    told = one.make(SUMS, roster, 3.0)
    assert [[peer for peer, _ in cover.reducers] for cover in told["c"]] == [["b"], ["b"]]


def test_who_leaves_takes_the_votes_with_it_and_excuses_who_was_late():
    one = reduce()
    one.vote("a", vote(), ROSTER, 1.0)
    one.left()
    one.vote("b", vote(), ROSTER, 1.0)
    assert one.decision is None


def test_a_plan_is_overdue_when_nothing_comes_and_who_is_silent_three_times_is_mute():
    one, now = reduce(), 0.0
    one.moves("a", Reducing(line=LINE, step=0, plan=1), 9.0)
    assert not one.overdue(18.0)
    assert one.overdue(19.0)
    for _ in range(MAX_PLANS - 1):
        one.ran_out()
        now += 1000.0
        one.make(SUMS, ROSTER, now)
        assert one.mute(ROSTER, now) == []
    one.vote("b", vote(plan=MAX_PLANS), ROSTER, 1.0)
    assert one.mute(ROSTER, now + 1000.0) == ["a"]
    assert one.mute(ROSTER, now + 1.0) == []


def test_what_a_step_needed_is_waited_for_in_the_next_ones_and_never_more():
    """Reduces that take twelve seconds: after one timeout there is none for a few steps.

    Nobody gets longer timeouts by being late.
    """
    timeouts = AdaptiveTimeouts()

    def step(gap_s: float) -> bool:
        """Whether a reduce whose shards come this far apart timed out on its way."""
        one, now = reduce_of(timeouts=timeouts), 0.0
        one.make(SUMS, ROSTER, now)
        voided = False
        while one.overdue(now + gap_s - 1e-6):
            voided = one.ran_out()
            one.make(SUMS, ROSTER, now)
        for peer in ROSTER:
            now += gap_s
            one.moves(peer, Reducing(line=LINE, step=0, plan=one.plan), now)
            one.vote(peer, vote(plan=one.plan), ROSTER, now)
        assert one.decision is not None
        timeouts.committed()
        return voided

    assert [step(12.0) for _ in range(20)] == [True] + 19 * [False]
    for _ in range(20):
        step(9.0)
    assert timeouts.scaled(10.0) == pytest.approx(13.5)
    for _ in range(20):
        step(13.4)
    assert timeouts.scaled(10.0) == pytest.approx(13.5)


def test_shards_are_shorter_where_many_add_up():
    many = [f"v{n:02}" for n in range(24)]
    roster, sums = (
        dict.fromkeys(many, (0, 2)),
        {b: [(peer, (n,)) for n, peer in enumerate(many)] for b in (0, 1)},
    )
    told = reduce_of().make(sums, roster, 0.0)
    assert {cover.length for cover in told["v00"]} == {LENGTH // 3}
    told = reduce_of().make(SUMS, ROSTER, 0.0)
    assert {cover.length for cover in told["a"]} == {0}, "as usual"


def test_norms_of_groups_add_up_over_the_blocks():
    def of(*squares):
        return BlockVote(block=0, digest="x", squared_norm=9.0, finite=True, group_squares=squares)

    assert group_squares({0: of(1.0, 2.0), 1: of(4.0, 0.0)}) == {"group_squares": [5.0, 2.0]}
    assert group_squares({0: of(1.0, 2.0), 1: of()}) == {}, "a holder of an earlier version"
    assert group_squares({0: of(1.0, 2.0), 1: of(4.0)}) == {}
    assert group_squares({0: of()}) == group_squares({}) == {}


def test_a_norm_of_a_group_that_no_sum_has_is_refused():
    one = reduce()
    block = BlockVote(block=0, digest="x", squared_norm=1.0, finite=True, group_squares=(1e301,))
    with pytest.raises(ProtocolError, match="norm"):
        one.vote("a", Vote(line=LINE, step=0, plan=1, blocks=(block,)), ROSTER, 1.0)
