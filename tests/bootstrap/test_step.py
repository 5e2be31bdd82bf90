"""One step at the coordinator, driven by hand: how it is shared, what is handed out again, plans
and votes.
"""

import math

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.reputation import CheckRules
from hetpeer.bootstrap.coordinator.step_failures import MAX_FAILURES
from hetpeer.bootstrap.state.effects import CoordinatorState
from hetpeer.bootstrap.state.membership import BlockDemand
from hetpeer.bootstrap.trust.reduce_complaints import REFUSED
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.block.fingerprint import KEY_BYTES, distance
from hetpeer.stages.pipeline.place_memory import PlaceDemand
from hetpeer.stages.planning.swarms.plan_inputs import Compression
from tests.bootstrap.court import BLOCKS, Court, failed, kinds, objection, reducing, training


def test_work_is_shared_by_the_speed_that_was_found_on_the_place():
    court = Court()
    for peer, speed in (("slow", 1e9), ("fast", 3e9)):
        court.prepare(peer, speed)
    court.begin_prepared("slow", "fast")
    assert {peer: len(court.sent[peer, "begin"].tasks) for peer in ("slow", "fast")} == {"slow": 0, "fast": 2}


def test_links_aim_at_what_was_last_said_in_whatever_state():
    """Among peers on the roster; the author's ratio bounds the slowest link."""
    court = Court(layouts=(((0, 1), (1, 2)),), link_ratio=10.0)
    seen = set()

    def pace(peer, computing, **links):
        seen.add(court.core.state)
        assert court.tell(peer, m.Paced(computing=computing, links=links)) == []

    for peer in ("a", "b"):
        court.prepare(peer)
        pace(peer, 9.0)
    court.begin_prepared("a", "b")
    assert court.sent["a", "begin"].target == 0.0
    pace("a", 0.5, b=20.0, gone=1000.0)
    pace("b", 0.25, a=1.0)
    court.count("a", "b")
    pace("b", 0.25, a=1.0)
    court.commit("a", "b")
    assert court.sent["a", "begin"].target == court.sent["b", "begin"].target == 2.0
    pace("a", 6.0, b=20.0)  # as long as the slowest computes
    while court.core.state is CoordinatorState.TRAINING and court.core.step < 3:
        court.commit("a", "b")
    assert court.sent["a", "begin"].target == 6.0
    assert {CoordinatorState.TRAINING, CoordinatorState.REDUCING} <= seen


def test_links_aim_at_more_seconds_while_the_ratio_rises():
    court = Court(layouts=(((0, 1), (1, 2)),), link_ratio=100.0, link_warmup=2)
    for peer, other in ("ab", "ba"):
        court.prepare(peer)
        court.tell(peer, m.Paced(computing=0.1, links={other: 40.0}))
    court.begin_prepared("a", "b")
    found = []
    while court.core.step < 3:
        found.append(court.sent["a", "begin"].target)
        court.commit("a", "b")
    assert found == pytest.approx([10.0, 2.0, 0.4])


def test_links_that_adapt_aim_at_the_least_time_to_a_loss():
    """The ratio that pays stays the same while lines are measured with noise; the target follows them."""
    adaptive = Compression(forward=100.0, backward=100.0, adaptive=True)
    court = Court(layouts=(((0, 1), (1, 2)),), link_ratio=100.0, compression=adaptive)
    for peer, other in ("ab", "ba"):
        court.prepare(peer)
        court.tell(peer, m.Paced(computing=10.0, links={other: 40.0}))
    court.begin_prepared("a", "b")
    assert court.sent["a", "begin"].target == pytest.approx(10.0), "rounding is enough to keep up"
    for peer, other in ("ab", "ba"):
        court.tell(peer, m.Paced(computing=10.0, links={other: 41.0}))
    court.commit("a", "b")
    assert court.sent["a", "begin"].target == pytest.approx(10.0 * 41 / 40)


def test_a_step_is_committed_when_all_holders_voted_alike():
    court = training()
    effects = court.count("a")
    assert court.told("a", effects) == ["settled", "plan"]
    assert court.told("b", effects) == ["plan"]
    cover = court.sent["b", "plan"].covers[0]
    assert (cover.slots, cover.receivers) == ((("a", (0, 1)),), ("a", "b"))
    assert court.vote("a", norm=4.0) == []
    effects = court.vote("b", norm=4.0)
    record = effects[0].record
    assert (record["kind"], record["step"], record["plan"], record["loss"]) == ("commit", 0, 1, 0.5)
    assert record["norm"] == pytest.approx(math.sqrt(8.0))
    assert record["coefficient"] == pytest.approx(1 / math.sqrt(8.0), rel=1e-5)
    assert court.told("a", effects) == ["commit", "begin"]


def test_who_leaves_losses_out_commits_nothing():
    """A commit whose loss is not a number could not be read again."""
    court = training()
    ids = [task.id for task in court.sent["a", "begin"].tasks]
    contents = (m.Contents(begin=0, end=BLOCKS, ids=tuple(ids)),)
    effects = court.tell("a", m.Sealed(line=court.line, step=0, slot=0, contents=contents, losses={}))
    assert court.sent["a", "settled"].refused == (BLOCKS - 1,)
    assert "plan" not in court.told("a", effects)


def test_votes_count_for_their_plan_only_and_for_all_blocks_of_the_voter():
    court = reducing()
    assert court.vote("a", plan=0) == []
    court.vote("a")
    short = m.Vote(line=court.line, step=0, plan=1, blocks=())
    assert court.tell("b", short) == []
    assert court.core.state is CoordinatorState.REDUCING


def test_messages_of_another_line_or_step_change_nothing():
    court = reducing()
    vote = m.Vote(line=m.TermView(term=9, view=0), step=0, plan=1, blocks=())
    for message in (vote, vote.model_copy(update={"line": court.line, "step": 7})):
        assert court.tell("a", message) == []


def test_sums_that_are_no_numbers_whoever_adds_them_up_halt_the_run_by_name():
    court = Court().begin("a", "b", "c")
    court.count("a")
    while court.core.state is not CoordinatorState.FINISHED:
        for peer in "abc":
            effects = court.vote(peer, finite=False)
    assert kinds(effects) == ["halt"]
    assert "the sum of block 0 is not finite, whoever adds it up at step 0" in effects[-1].why
    assert not effects[-1].completed


@pytest.mark.parametrize("lie", [0.0, 1e200])
def test_a_norm_that_nobody_else_has_found_scales_no_update(lie):
    court = reducing()
    court.vote("a", norm=lie)
    effects = court.vote("b")
    assert kinds(effects) == []
    assert court.told("b", effects) == ["plan"]


@pytest.mark.parametrize("norm", [1e308, math.inf])
def test_a_norm_that_no_sum_has_is_an_offence(norm):
    court = reducing()
    with pytest.raises(ProtocolError) as caught:
        court.vote("a", norm=norm)
    assert caught.value.peer == "a"
    court.vote("b")
    assert kinds(court.vote("a"))[0] == "commit"


def test_votes_that_differ_are_taken_again_and_looked_at_closely():
    court = reducing()
    court.vote("a")
    assert court.told("a", court.vote("b", digest="other")) == ["plan"]
    assert court.sent["a", "plan"].closely == (0, 1)
    court.vote("a")
    effects = court.vote("b", digest="other")
    assert "fenced" in [kind for peer in "ab" for kind in court.told(peer, effects)], "nobody else adds up"
    assert court.core.state is not CoordinatorState.FINISHED


def test_who_was_fenced_does_not_come_into_the_same_step_again():
    court = reducing()
    for _ in range(2):
        court.vote("a")
        court.vote("b", digest="other")
    (gone,) = [record["peer"] for record in court.records if record["kind"] == "gone"]
    left = next(peer for peer in "ab" if peer != gone)
    court.sent.clear()
    court.prepare(gone)
    assert (gone, "fetch") not in court.sent
    court.count(left)
    assert "commit" in kinds(court.vote(left))
    assert (gone, "fetch") in court.sent


def test_plans_that_died_with_their_holders_do_not_make_a_split_vote_fatal():
    court = Court().begin("a", "b", "c", "d", "e")
    court.count("a")
    for peer in ("c", "d", "e"):
        court.tell(peer, m.Farewell())
    assert court.sent["a", "plan"].plan == 4
    court.vote("a")
    assert court.told("a", court.vote("b", digest="other")) == ["plan"]


def test_who_says_that_shards_arrive_oftener_than_there_are_is_not_believed():
    court = reducing()
    for _ in range(10 * int(court.core._context.config.reduce_s)):
        court.tick(1.0)
        court.tell("a", m.Heartbeat())
        court.tell("b", m.Reducing(line=court.line, step=0, plan=court.sent["a", "plan"].plan))
    assert court.sent["a", "plan"].plan > 1


def test_a_plan_that_goes_on_is_not_given_up_however_slow_it_is():
    large = BlockDemand(elements=1 << 27, memory=PlaceDemand(activations=1), flops=1.0)
    court = Court(costs=[large] * BLOCKS).begin("a", "b")
    court.count("a")
    reduce_s = court.core._context.config.reduce_s

    def second(plan):
        court.tick(1.0)
        court.tell("a", m.Heartbeat())
        court.tell("b", m.Reducing(line=court.line, step=0, plan=plan))

    for _ in range(10 * int(reduce_s)):
        second(plan=1)
    assert court.sent["a", "plan"].plan == 1
    for _ in range(int(reduce_s) + 1):
        second(plan=0)  # an older plan, which says nothing of this one
    assert court.sent["a", "plan"].plan == 2


def test_who_is_silent_on_three_plans_is_fenced():
    court = reducing()
    for _ in range(300):
        if ("b", "fenced") in court.sent:
            break
        court.tell("a", m.Heartbeat())
        court.tell("b", m.Heartbeat())
        if court.sent["a", "plan"].plan == 3:
            court.vote("a")
        court.tick(1.0)
    assert ("a", "fenced") not in court.sent
    assert list(court.core.members.volunteers) == ["a"]
    assert court.sent["a", "plan"].plan == 4


def test_who_sends_what_cannot_be_added_has_to_come_back_and_its_work_is_done_again():
    court = training()
    court.sealed("a", (0,))
    court.sealed("b", (1,))
    assert court.core.state is CoordinatorState.REDUCING
    assert court.tell("a", objection(court, "b", plan=2)) == []
    assert court.tell("a", objection(court, "stranger")) == []
    assert court.told("b", court.tell("a", objection(court, "b"))) == ["fenced"]
    (gone,) = [record for record in court.records if record["kind"] == "gone"]
    assert (gone["peer"], gone["why"]) == ("b", REFUSED)


def test_ids_are_handed_out_again_and_then_on_another_way():
    court = training()
    first = {t.id: t.route[0].peer for p in "ab" for t in court.sent[p, "begin"].tasks}
    court.sent.clear()

    def wait():
        while not court.sent:
            court.tell("a", m.Heartbeat())
            court.tell("b", m.Heartbeat())
            court.tick(1.0)
        tasks = [t for (_, kind), x in court.sent.items() if kind == "reroute" for t in x.tasks]
        court.sent.clear()
        return tasks

    again = wait()
    assert {t.id: (t.route[0].peer, t.attempt) for t in again} == {i: (p, 1) for i, p in first.items()}
    detour = wait()
    assert all(t.route[0].peer != first[t.id] and t.attempt == 2 for t in detour)


def test_the_last_ids_are_hedged_once_when_they_take_unusually_long():
    court = Court(sizes=(1,) * 40).begin("a", "b")
    first = {t.id: t.route[0].peer for p in "ab" for t in court.sent[p, "begin"].tasks}
    court.tick(3.0)
    court.sealed("a", range(20))
    court.tick(0.4)
    court.sealed("b", range(20, 38), slot=1)
    court.sent.clear()
    # nothing was counted for 3 s at most; now everybody is asked to report, and nothing is handed out
    court.tick(5.0)
    assert {key: x.tasks for key, x in court.sent.items()} == {("a", "reroute"): (), ("b", "reroute"): ()}
    court.sent.clear()
    court.tick(1.4)
    tasks = [t for (_, kind), x in court.sent.items() if kind == "reroute" for t in x.tasks]
    assert {t.id for t in tasks} == {38, 39}
    assert all(t.route[0].peer != first[t.id] and t.attempt == 1 for t in tasks)
    court.sent.clear()
    court.tick(3.0)
    assert not court.sent
    court.sealed(tasks[0].route[0].peer, (38, 39), slot=2)
    assert court.core.state is CoordinatorState.REDUCING


def test_nothing_is_hedged_before_anything_was_counted_nor_many_at_once():
    court = Court(sizes=(1,) * 40).begin("a", "b")
    court.sent.clear()
    court.tick(5.0)
    court.sealed("a", range(20))
    court.tell("b", m.Heartbeat())
    court.sent.clear()
    court.tick(9.0)
    assert not court.sent


def test_a_failure_goes_to_somebody_else_and_halts_when_nobody_is_left():
    """Not before: three lying volunteers could halt any run."""
    court = Court().begin("a", "b", "c", "d")
    peer, tried = "a", []
    for _ in range(3):
        (reroute,) = failed(court, peer)
        tried.append(peer)
        peer = reroute.to
        assert peer not in tried
    effects = failed(court, peer)
    assert "microbatch 0 of step 0 failed 4 times: non-finite" in effects[-1].why


def test_one_volunteer_that_fails_again_and_again_does_not_halt_the_others():
    court = Court().begin("a", "b")
    for _ in range(MAX_FAILURES):
        (reroute,) = failed(court, "a")
        assert reroute.to == "b"
    assert failed(court, "a") == [], "it has been heard often enough"


@pytest.mark.parametrize(("share", "reducers"), [(0.0, ["a"]), (0.1, ["a", "b", "c", "d"])])
def test_who_says_that_its_line_is_the_fastest_of_all_reduces_alone_but_where_sums_are_checked(
    share, reducers
):
    court = Court(
        checks=CheckRules(share=share, draw=lambda: 0.9, key=lambda: bytes(KEY_BYTES), distance=distance)
        if share
        else None
    ).begin(*"abcd")
    for peer in "abcd":
        court.tell(peer, m.Paced(computing=0.0, links={}, uplink=1e12 if peer == "a" else 1.0))
    court.commit(*"abcd")
    court.count("b")
    assert court.sent["b", "plan"].step == 1
    for cover in court.sent["b", "plan"].covers:
        assert [peer for peer, _ in cover.reducers] == reducers
