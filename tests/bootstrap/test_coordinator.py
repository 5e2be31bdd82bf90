"""The coordinator's state machine, driven by hand."""

import math

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.decisions import CollectCheckpoint, Disconnect, Halt, Record, Send, State
from hetpeer.bootstrap.membership import Standing
from tests.bootstrap.court import Court


def kinds(effects):
    return [x.record["kind"] for x in effects if isinstance(x, Record)]


def waiting():
    return Court()


def syncing():
    court = Court()
    court.prepare("a")
    return court


def training():
    return Court().begin("a", "b")


def reducing():
    court = training()
    court.count("a")
    return court


def finished():
    court = Court(steps=1, checkpoint_every=1).begin("a", "b")
    court.commit("a", "b")
    court.save()
    return court


def objection(court, peer, plan=1):
    return m.Objection(
        line=court.line, step=court.core.step or 0, plan=plan, block=1, peer=peer, why="not finite"
    )


COURTS = {
    State.WAITING: waiting,
    State.SYNCING: syncing,
    State.TRAINING: training,
    State.REDUCING: reducing,
    State.FINISHED: finished,
}


@pytest.mark.parametrize("state", State, ids=lambda state: state.value)
def test_the_courts_are_in_the_state_they_claim(state):
    assert COURTS[state]().core.state is state


# ── joining ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_term_is_durable_before_anything_is_said():
    court = Court([{"kind": "reign", "term": 4}])
    assert court.records[-1] == {"kind": "reign", "term": 5}
    assert court.line == m.Line(term=5, view=0)


def test_a_run_that_is_over_needs_no_volunteer():
    commits = [{"kind": "commit", "step": step, "loss": 1.0} for step in range(4)]
    sealed = {"kind": "checkpoint", "version": 4, "blocks": ["x", "y"]}
    over = Court([*commits, sealed])
    assert over.core.state is State.FINISHED
    assert over.records == [*commits, sealed]
    assert Court(commits).core.state is State.WAITING
    assert Court([*commits, sealed], evaluation_microbatches=1).core.state is State.WAITING


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (m.Hello(run="run", incarnation=1, wire_version=99), "version"),
        (m.Hello(run="other", incarnation=1), "run"),
    ],
)
def test_who_cannot_take_part_is_told_why(hello, reason):
    court = Court()
    told, closed = court.tell("a", hello)
    assert (told.message.kind, told.message.reason, closed) == ("rejected", reason, Disconnect("a"))
    assert "a" not in court.core.members.volunteers


def test_work_is_shared_by_the_speed_that_was_found_on_the_place():
    court = Court()
    for peer, speed in (("slow", 1e9), ("fast", 3e9)):
        court.prepare(peer, speed)
    court.begin_prepared("slow", "fast")
    assert {peer: len(court.sent[peer, "begin"].tasks) for peer in ("slow", "fast")} == {"slow": 0, "fast": 2}


def test_links_aim_at_what_was_last_said_in_whatever_state():
    """Of those on the roster; the author's ratio bounds what the slowest link is asked for."""
    court = Court(link_ratio=10.0)
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
    while court.core.state is State.TRAINING and court.core.step < 3:
        court.commit("a", "b")
    assert court.sent["a", "begin"].target == 6.0
    assert {State.TRAINING, State.REDUCING} <= seen


def test_strangers_are_fenced_until_they_introduce_themselves():
    told, closed = Court().tell("a", m.Heartbeat())
    assert (told.message.kind, closed) == ("fenced", Disconnect("a"))


def test_claims_race_and_the_second_is_offered_what_is_left():
    court = Court()
    court.hello("a")
    court.hello("b")
    claim = m.Claim(cluster=0, begin=0, end=2)
    assert court.told("a", court.tell("a", claim)) == ["granted"]
    (refused,) = court.tell("b", claim)
    assert [p.cluster for p in refused.message.places if p.open] == [1]
    assert court.tell("a", m.Claim(cluster=1, begin=0, end=2)) == []


def test_an_older_incarnation_is_fenced_and_a_newer_one_displaces():
    court = training()
    told, _ = court.hello("a", incarnation=0)
    assert told.message.kind == "fenced"
    effects = court.hello("a", incarnation=2)
    assert kinds(effects) == ["gone"]
    assert "gone" in court.told("b", effects)
    assert court.told("a", effects) == ["welcome"]


@pytest.mark.parametrize("state", [s for s in State if s is not State.FINISHED], ids=lambda s: s.value)
def test_a_new_session_of_the_same_incarnation_begins_anew(state):
    """Nothing of the old session counts any more; the place is kept where it fits."""
    court = COURTS[state]()
    court.hello("a", place=(0, 2)) if state is State.WAITING else None
    court.hello("a", place=(0, 2))
    volunteer = court.core.members.volunteers["a"]
    assert (volunteer.standing, volunteer.place) == (Standing.JOINING, (0, 2))
    assert court.sent["a", "welcome"].member
    if state in (State.TRAINING, State.REDUCING):
        assert court.core.state is State.TRAINING
        assert court.sent["b", "gone"].peers == ("a",)


def test_a_sole_holder_that_comes_back_as_a_new_session_takes_the_run_back():
    court = Court().begin("a")
    court.commit("a")
    effects = court.hello("a", place=(0, 2))
    assert kinds(effects) == ["gone", "rollback"]
    assert court.sent["a", "welcome"].version == 0


# ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────────


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


def test_votes_count_for_their_plan_only_and_for_all_blocks_of_the_voter():
    court = reducing()
    assert court.vote("a", plan=0) == []
    court.vote("a")
    short = m.Vote(line=court.line, step=0, plan=1, blocks=())
    assert court.tell("b", short) == []
    assert court.core.state is State.REDUCING


def test_messages_of_another_line_or_step_change_nothing():
    court = reducing()
    vote = m.Vote(line=m.Line(term=9, view=0), step=0, plan=1, blocks=())
    for message in (vote, vote.model_copy(update={"line": court.line, "step": 7})):
        assert court.tell("a", message) == []


def test_a_vote_for_something_not_finite_halts_the_run_by_name():
    court = reducing()
    court.vote("a", finite=False)
    effects = court.vote("b", finite=False)
    assert kinds(effects) == ["halt"]
    assert "the sum of block 0 is not finite at step 0" in effects[-1].why
    assert not effects[-1].completed


@pytest.mark.parametrize("lie", [0.0, 1e200, math.inf])
def test_a_norm_that_nobody_else_has_found_scales_no_update(lie):
    court = reducing()
    court.vote("a", norm=lie)
    effects = court.vote("b")
    assert kinds(effects) == []
    assert court.told("b", effects) == ["plan"]


def test_norms_that_cannot_be_added_halt_the_run_and_not_the_coordinator():
    court = reducing()
    court.vote("a", norm=1e308)
    effects = court.vote("b", norm=1e308)
    assert kinds(effects) == ["halt"]
    assert "not finite" in effects[-1].why


def test_votes_that_differ_are_taken_again_and_then_halt():
    court = reducing()
    for _ in range(2):
        court.vote("a")
        assert court.told("a", court.vote("b", digest="other")) == ["plan"]
    court.vote("a")
    effects = court.vote("b", digest="other")
    assert "differ in the bits" in effects[-1].why


def test_plans_that_died_with_their_holders_do_not_make_a_split_vote_fatal():
    court = Court().begin("a", "b", "c", "d", "e")
    court.count("a")
    for peer in ("c", "d", "e"):
        court.tell(peer, m.Farewell())
    assert court.sent["a", "plan"].plan == 4
    court.vote("a")
    assert court.told("a", court.vote("b", digest="other")) == ["plan"]


def test_a_plan_that_goes_on_is_not_given_up_however_slow_it_is():
    court = reducing()
    reduce_s = court.core._reign.config.reduce_s

    def second(plan):
        court.tick(1.0)
        court.tell("a", m.Heartbeat())
        court.tell("b", m.Reducing(line=court.line, step=0, plan=plan))

    for _ in range(10 * int(reduce_s)):
        second(plan=1)
    assert court.sent["a", "plan"].plan == 1
    for _ in range(int(reduce_s) + 1):
        second(plan=0)  # an older one, which says nothing of this
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
    court.tick(5.0)  # the longest lull was 3 s; everybody is to say what it has, and nothing is handed out
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
    assert court.core.state is State.REDUCING


def test_nothing_is_hedged_before_anything_was_counted_nor_many_at_once():
    court = Court(sizes=(1,) * 40).begin("a", "b")
    court.sent.clear()
    court.tick(5.0)
    court.sealed("a", range(20))
    court.tell("b", m.Heartbeat())
    court.sent.clear()
    court.tick(9.0)
    assert not court.sent


def failed(court, peer, microbatch=0):
    return court.tell(peer, m.Failed(line=court.line, step=0, id=microbatch, why="non-finite"))


def test_a_failure_goes_to_somebody_else_and_three_of_them_halt():
    court = Court().begin("a", "b", "c", "d")
    for peer in ("a", "b"):
        (reroute,) = failed(court, peer)
        assert reroute.to not in "ab"[: "ab".index(peer) + 1]
    effects = failed(court, "c")
    assert "microbatch 0 of step 0 failed 3 times: non-finite" in effects[-1].why


def test_one_volunteer_that_fails_again_and_again_does_not_halt_the_others():
    court = Court().begin("a", "b")
    for _ in range(5):
        (reroute,) = failed(court, "a")
        assert reroute.to == "b"


def test_a_sole_holder_has_three_tries():
    court = Court().begin("a")
    assert [isinstance(failed(court, "a")[-1], Halt) for _ in range(3)] == [False, False, True]


# ── losing volunteers ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_broken_stream_has_its_grace():
    court = training()
    court.do(court.core.broken("a", court.now))
    court.tick(1.8)
    court.do(court.core.resumed("a", court.now))
    court.tick(1.8)
    assert "a" in court.core.members.volunteers
    court.do(court.core.broken("a", court.now))
    effects = court.tick(2.4)
    assert [x.record["why"] for x in effects if isinstance(x, Record)] == ["stream broken"]


def test_a_lease_expires_but_not_while_we_sleep_ourselves():
    court = training()
    court.now += 60.0
    assert kinds(court.tick(8.0)) == []
    effects = court.tick(4.0)
    assert kinds(effects) == ["gone", "gone", "rollback"]


def test_several_that_leave_at_once_make_one_new_plan():
    court = Court().begin("a", "b", "c")
    court.count("a")
    court.tick(6.0)
    court.tell("a", m.Heartbeat())
    effects = court.tick(5.0)
    assert kinds(effects) == ["gone", "gone"]
    assert court.told("a", effects) == ["gone", "plan"]
    assert court.sent["a", "plan"].covers[0].receivers == ("a",)


def test_what_a_lost_holder_had_counted_is_done_again():
    court = reducing()
    court.tell("a", m.Farewell())
    assert court.core.state is State.TRAINING
    court.sealed("b", (0, 1))
    assert court.sent["b", "plan"].covers[0].slots == (("b", (0, 1)),)


def test_without_a_holder_the_run_goes_back_to_the_checkpoint():
    court = Court().begin("a", "b")
    for _ in range(2):
        court.commit("a", "b")
    court.save()
    court.commit("a", "b")
    court.tell("a", m.Farewell())
    effects = court.tell("b", m.Farewell())
    (record,) = [x.record for x in effects if isinstance(x, Record) and x.record["kind"] == "rollback"]
    assert (record["to_version"], record["view"]) == (2, 1)
    assert sorted(court.core.history.commits) == [0, 1]


def one_each():
    """Two volunteers with a block each, in a step whose state lies in the store."""
    commits = [{"kind": "commit", "step": step, "loss": 1.0} for step in range(2)]
    sealed = {"kind": "checkpoint", "version": 2, "blocks": ["state 0", "state 1"]}
    return Court([*commits, sealed], layouts=(((0, 1), (1, 2)),)).begin("a", "b")


def test_a_step_waits_for_a_new_holder_while_its_state_can_be_had():
    court = one_each()
    court.sealed("a", (0, 1), blocks=(0, 1))
    effects = court.tell("b", m.Farewell())
    assert (kinds(effects), court.core.state) == (["gone"], State.TRAINING)
    assert court.told("c", court.prepare("c")) == ["fetch"]
    effects = court.ready("c")
    begin = court.sent["c", "begin"]
    assert (begin.entry, set(begin.roster), begin.incarnations) == (1, {"a", "c"}, {"a": 1, "c": 1})
    assert court.told("a", effects) == []  # nobody is told: who needs it will hear it from the newcomer
    court.sealed("c", (0, 1), blocks=(1, 2))
    assert court.core.state is State.REDUCING
    assert kinds([*court.vote("a"), *court.vote("c")]) == ["commit"]


def test_a_holder_that_comes_back_with_its_state_goes_on_with_the_step():
    court = one_each()
    court.sealed("b", (0, 1), blocks=(1, 2))
    court.do(court.core.broken("b", court.now))
    assert kinds(court.tick(2.5)) == ["gone"]
    held = (m.Held(block=1, version=2, digest="state 1"),)
    court.hello("b", place=(1, 2), held=held)
    court.ready("b")
    assert court.sent["b", "begin"].entry == 1
    court.sealed("a", (0, 1), blocks=(0, 1))
    assert court.core.state is State.TRAINING  # what it had counted died with its place in the step
    effects = court.sealed("b", (0, 1), blocks=(1, 2))
    assert court.sent["b", "settled"].refused == ()
    assert "plan" in court.told("b", effects)


def test_microbatches_that_begin_at_an_orphaned_block_are_handed_to_the_newcomer():
    court = one_each()
    effects = court.tell("a", m.Farewell())
    assert court.told("b", effects) == ["gone"]
    court.prepare("c")
    effects = court.ready("c")
    assert court.told("c", effects) == ["begin", "reroute"]
    assert [task.id for task in court.sent["c", "reroute"].tasks] == [0, 1]


def test_who_came_in_is_made_known_when_the_step_makes_no_progress():
    court = one_each()
    court.tell("b", m.Farewell())
    court.prepare("c")
    court.ready("c")
    for _ in range(4):
        for peer in ("a", "c"):
            court.tell(peer, m.Heartbeat())
        effects = court.tick(4.0)
    assert court.told("a", effects) == ["joined", "reroute"]
    assert court.sent["a", "joined"].entrants == (m.Entrant(peer="c", incarnation=1, begin=1, end=2),)


def test_an_orphaned_step_is_given_up_for_somebody_who_can_be_spared():
    court = Court(layouts=(((0, 1), (1, 2)),)).begin("a", "b", "c")
    assert court.core.members.volunteers["c"].place == (0, 1)
    court.tell("b", m.Farewell())
    court.tick(4.0)
    assert court.core.state is State.TRAINING
    assert kinds(court.tick(2.0)) == ["rollback"]


def test_a_state_that_differs_does_not_enter_a_step():
    court = one_each()
    court.tell("b", m.Farewell())
    court.prepare("c")
    assert court.told("c", court.ready("c", digest="wrong")) == ["fenced"]


def test_bits_that_differ_from_the_others_or_from_the_checkpoint_are_fenced():
    court = training()
    court.count("a")
    court.vote("a")
    court.vote("b")
    assert court.applied("a") == []
    assert court.told("b", court.applied("b", digest="wrong")) == ["fenced"]
    court = training()
    court.commit("a", "b")
    court.commit("a", "b")
    court.save()
    court.tell("a", m.Farewell())
    court.tell("b", m.Farewell())
    court.prepare("c")
    assert court.sent["c", "fetch"].digests == {0: "state 0", 1: "state 1"}
    assert court.told("c", court.ready("c", digest="wrong")) == ["fenced"]


def test_who_sends_what_cannot_be_added_has_to_come_back_and_its_work_is_done_again():
    court = training()
    court.count("a")
    assert court.core.state is State.REDUCING
    assert court.tell("a", objection(court, "b", plan=2)) == []
    assert court.tell("a", objection(court, "stranger")) == []
    assert court.told("b", court.tell("a", objection(court, "b"))) == ["fenced"]
    (gone,) = [record for record in court.records if record["kind"] == "gone"]
    assert (gone["peer"], gone["why"]) == ("b", "what it sent of block 1 cannot be added: not finite")


# ── border ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_joiner_is_waited_for_but_not_for_ever():
    court = Court(sync_s=5.0).begin("a")
    court.prepare("b")
    court.commit("a")
    assert court.core.state is State.SYNCING
    assert court.sent["b", "fetch"].sources == {0: ("a",), 1: ("a",)}
    for _ in range(6):
        court.tell("a", m.Heartbeat())
        court.tell("b", m.Heartbeat())
        court.tick(1.0)
    assert (court.core.state, court.core.step) == (State.TRAINING, 1)
    court.commit("a")
    assert (court.core.state, court.sent["b", "fetch"].version) == (State.SYNCING, 2)


def test_who_never_gets_ready_is_waited_for_ever_less():
    court = Court(sync_s=8.0, steps=20).begin("a")
    court.prepare("b")
    waits = []
    for _ in range(7):
        court.commit("a")
        began = court.now
        while court.core.state is State.SYNCING:
            for peer in ("a", "b"):
                court.tell(peer, m.Heartbeat())
            court.tick()
        waits.append(court.now - began)
    assert waits == pytest.approx([8, 4, 2, 1, 0.5, 0, 0], abs=0.5)


def test_somebody_else_comes_where_somebody_has_a_place_and_never_works():
    """What it needs cannot be had, or it does so on purpose."""
    court = Court(layouts=(((0, 1), (1, 2)),), sync_s=2.0)
    for peer in ("a", "b", "c"):
        court.hello(peer)
        place = next(place for place in court.sent[peer, "welcome"].places if place.open)
        court.tell(peer, m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))
    silent = next(p for p, v in court.core.members.volunteers.items() if v.place == (1, 2))
    others = [peer for peer in ("a", "b", "c") if peer != silent]
    for peer in others:
        court.tell(peer, m.Prepared())
        court.ready(peer)
    for _ in range(60):
        for peer in ("a", "b", "c"):
            court.tell(peer, m.Heartbeat())
        court.tick(0.5)
    assert [p for p in others if court.sent[p, "granted"].begin == 1] != []


def test_who_is_prepared_and_waits_for_the_border_is_counted_on():
    court = Court(sync_s=0.5).begin("a", "b")
    court.count("a")
    court.prepare("c")
    for _ in range(10):
        for peer in ("a", "b", "c"):
            court.tell(peer, m.Heartbeat())
        court.tick(0.5)
    newcomer = court.core.members.volunteers["c"]
    assert (newcomer.standing, newcomer.slow) == (Standing.PREPARED, False)


def test_a_ready_that_does_not_prove_its_whole_place_is_not_believed():
    court = Court()
    court.prepare("a")
    held = (m.Held(block=0, version=0, digest="state 0"),)
    assert court.tell("a", m.Ready(line=court.line, version=0, held=held)) == []
    old = tuple(m.Held(block=b, version=7, digest="") for b in (0, 1))
    assert court.tell("a", m.Ready(line=court.line, version=0, held=old)) == []
    assert court.core.state is State.SYNCING


def test_a_gap_is_filled_by_somebody_redundant_once_the_state_can_be_had():
    court = Court(layouts=(((0, 1), (1, 2)),), checkpoint_every=1)
    for peer in ("a", "b", "c"):
        court.prepare(peer)
    places = {p: v.place for p, v in court.core.members.volunteers.items()}
    assert sorted(places.values()) == [(0, 1), (0, 1), (1, 2)]
    lonely = next(p for p, place in places.items() if place == (1, 2))
    court.tell(lonely, m.Farewell())
    others = [p for p in places if p != lonely]
    for peer in others:
        court.ready(peer)
    for _ in range(10):
        for peer in others:
            court.tell(peer, m.Heartbeat())
        court.tick(1.0)
    moved = [p for p in others if court.sent[p, "granted"].begin == 1]
    assert len(moved) == 1


def test_after_a_restart_holders_have_their_time_to_come_back():
    court = Court().begin("a", "b")
    court.commit("a", "b")
    again = Court(court.records)
    again.hello("a", place=(0, 2), held=(m.Held(block=0, version=1, digest=""),))
    assert (again.sent["a", "welcome"].member, again.sent["a", "welcome"].version) == (True, 1)
    again.ready("a")
    assert (again.core.state, again.core.step) == (State.TRAINING, 1)
    late = Court(court.records)
    late.hello("a")
    for _ in range(20):
        late.tell("a", m.Heartbeat())
        late.tick(1.0)
    assert late.records[-1]["kind"] == "rollback"


def test_a_voter_that_missed_the_commit_is_told_on_which_line_it_was_decided():
    court = Court().begin("a", "b")
    court.commit("a", "b")
    again = Court(court.records)
    again.hello("a", place=(0, 2), held=(m.Held(block=0, version=0, digest=""),))
    commit = again.sent["a", "welcome"].commit
    assert (commit.line, commit.step, commit.plan) == (court.line, 0, 1)


# ── checkpoints and the end ──────────────────────────────────────────────────────────────────────────────────────


def test_a_checkpoint_is_one_record_of_all_blocks():
    court = Court(checkpoint_every=1).begin("a", "b")
    effects = court.commit("a", "b")
    (collect,) = [x for x in effects if isinstance(x, CollectCheckpoint)]
    assert (collect.version, collect.savers) == (1, {0: "a", 1: "b"})
    court.do(court.core.saved(0, 0, "older", court.now))
    court.do(court.core.saved(1, 0, "x", court.now))
    assert court.records[-1]["kind"] == "commit"
    court.do(court.core.saved(1, 1, "y", court.now))
    assert court.records[-1] == {"kind": "checkpoint", "version": 1, "blocks": ["x", "y"]}


def test_a_checkpoint_that_fails_is_asked_of_others_at_the_next_border():
    court = Court(checkpoint_every=2).begin("a", "b")
    court.commit("a", "b")
    court.commit("a", "b")
    assert court.core.not_saved(2, court.now) == []
    effects = court.commit("a", "b")
    (collect,) = [x for x in effects if isinstance(x, CollectCheckpoint)]
    assert (collect.version, collect.savers) == (3, {0: "b", 1: "a"})


def test_a_saver_that_loses_its_state_does_not_hold_up_the_end():
    court = Court(steps=1).begin("a", "b")
    court.commit("a", "b")
    effects = court.tell("a", m.Prepared())
    (collect,) = [x for x in effects if isinstance(x, CollectCheckpoint)]
    assert set(collect.savers.values()) == {"b"}


def test_the_run_is_finished_when_the_last_checkpoint_is_durable():
    court = Court(steps=1, evaluation_microbatches=1, checkpoint_every=5).begin("a")
    court.tell("a", m.Evaluated(line=court.line, step=0, losses={2: 3.0}))
    court.commit("a")
    assert (court.core.state, court.core.step) == (State.TRAINING, 1)
    assert court.tell("a", m.Evaluated(line=court.line, step=1, losses={2: 2.0}))
    court.save()
    assert court.core.state is State.FINISHED
    assert court.sent["a", "finished"].completed
    assert court.core.history.evaluations == {0: 3.0, 1: 2.0}


def test_who_comes_after_the_end_is_told_how_it_ended():
    court = finished()
    told, _ = court.hello("z")
    assert (told.message.kind, told.message.completed) == ("finished", True)
    halted = reducing()
    halted.vote("a", finite=False)
    halted.vote("b", finite=False)
    told, _ = halted.hello("z")
    assert (told.message.completed, "not finite" in told.message.why) == (False, True)


def test_after_the_end_nothing_is_decided():
    court = Court().begin("a")
    for _ in range(3):
        effects = failed(court, "a")
    assert isinstance(effects[-1], Halt)
    before = len(court.records)
    court.tell("a", m.Farewell())
    court.tell("a", m.Prepared())
    court.tell("a", objection(court, "b"))
    court.tick(30.0)
    assert court.core.saved(0, 0, "x", court.now) == []
    assert court.core.not_saved(0, court.now) == []
    assert len(court.records) == before
    assert court.core.state is State.FINISHED


# ── cells that random histories reach too seldom ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", [s for s in State if s is not State.FINISHED], ids=lambda s: s.value)
def test_events_that_need_no_decision(state):
    court = COURTS[state]()
    court.hello("z")
    court.tell("z", m.Heartbeat())
    reached = court.core.state
    assert court.tell("z", m.Failed(line=court.line, step=0, id=0, why="x")) == []
    assert court.core.not_saved(99, court.now) == []
    assert court.core.resumed("z", court.now) == []
    assert court.core.resumed("nobody", court.now) == court.core.broken("nobody", court.now) == []
    assert kinds(court.tell("z", m.Farewell())) == ["gone"]
    assert "z" not in court.core.members.volunteers
    assert court.core.state is reached


def test_a_step_goes_on_without_those_who_are_not_in_it():
    court = training()
    court.prepare("c")
    assert court.tell("c", m.Sealed(line=court.line, step=0, slot=0, contents=(), losses={})) == []
    effects = court.tell("c", m.Farewell())
    assert [x for x in effects if isinstance(x, Send)] == []
    assert court.core.state is State.TRAINING


# ── coming into a step while it runs ─────────────────────────────────────────────────────────────────────────────


def test_a_newcomer_comes_into_the_running_step_and_gets_its_part():
    court = Court(sizes=(1,) * 40).begin("a")
    court.prepare("b")
    assert court.sent["b", "fetch"].sources == {0: ("a",), 1: ("a",)}
    court.sealed("a", range(10))
    court.ready("b")
    assert (court.sent["b", "begin"].entry, court.sent["b", "begin"].tasks) == (1, ())
    assert [entrant.peer for entrant in court.sent["a", "joined"].entrants] == ["b"]
    mine = court.sent["b", "reroute"].tasks
    assert [task.id for task in mine] == list(range(25, 40))
    assert all((task.route[0].peer, task.attempt) == ("b", 0) for task in mine)
    assert court.sent["a", "reroute"].tasks == mine  # they are not to be begun there
    court.sealed("a", range(10, 25), slot=1)
    court.sealed("b", range(25, 40))
    assert set(court.sent["b", "plan"].covers[0].receivers) == {"a", "b"}


def test_who_is_twice_as_fast_gets_twice_as_much():
    court = Court(sizes=(1,) * 40)
    court.prepare("a", flops_per_second=100.0)
    court.begin_prepared("a")
    court.prepare("b", flops_per_second=200.0)
    court.ready("b")
    assert len(court.sent["b", "reroute"].tasks) == 27


def test_nobody_comes_into_a_step_that_is_being_reduced():
    court = Court().begin("a")
    court.prepare("b")
    court.sealed("a", (0, 1))
    court.ready("b")
    assert ("b", "begin") not in court.sent
    court.vote("a")
    assert court.core.state is State.SYNCING  # it was too late: the next step waits for it
    court.ready("b")
    assert "b" in court.sent["a", "begin"].roster


def test_nobody_fetches_for_the_rest_of_a_step_that_is_almost_done():
    court = Court(sizes=(1,) * 40).begin("a")
    court.prepare("b")
    court.tick(8.0)
    court.ready("b")
    court.sealed("a", range(38), slot=1)
    court.prepare("c")
    assert ("c", "fetch") not in court.sent
    court.sealed("b", (38, 39))
    for peer in "ab":
        court.vote(peer)
    assert court.core.state is State.TRAINING  # nobody is waited for who can come in later
    assert court.sent["c", "fetch"].version == 1
