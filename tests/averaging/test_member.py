"""The member's protocol core, driven by hand through one life."""

import pytest

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import InStep
from hetpeer.averaging.member.held_step import Bundle
from hetpeer.averaging.member.member_life import Phase
from hetpeer.averaging.member.position import Origin
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.gradient_slots import Drop
from hetpeer.stages.pipeline.routes import Hop
from tests.averaging.rig import (
    DIGESTS,
    LINE,
    ME,
    STEP,
    begin,
    commit,
    fetch,
    loss_made,
    member_in,
    new_member,
    place,
    plan,
    reduced,
    welcome,
)

OLD = m.TermView(term=2, view=0)
NEW = m.TermView(term=2, view=2)
ROUTE = (Hop(ME, 0, 2),)
OLD_STEP = e.StepId(OLD, STEP.number)
OF_PLAN = {"line": LINE, "step": STEP.number, "plan": 1}
MARKS = tuple(m.Mark(block=block, begin=0, end=10, key=bytes(16)) for block in (0, 1, 2))

MESSAGES = {
    "welcome": welcome(),
    "granted": m.Granted(line=LINE, begin=1, end=2),
    "refused": m.Refused(why="taken", places=(place(),)),
    "fetch": fetch(version=4),
    "begin": begin(),
    "joined": m.Joined(line=LINE, step=3, entrants=(m.Entrant(peer="late", incarnation=1, begin=0, end=1),)),
    "reroute": m.Reroute(line=LINE, step=3, tasks=()),
    "gone": m.Gone(line=LINE, peers=("other",)),
    "settled": m.Settled(line=LINE, step=3, slot=5),
    "evict": m.Evict(line=LINE, step=3, blocks=(1,)),
    "plan": plan(number=1),
    "prove": m.Prove(**OF_PLAN, marks=MARKS),
    "testify": m.Testify(**OF_PLAN, marks=MARKS),
    "commit": commit(),
    "rolled_back": m.RolledBack(line=NEW, version=0, why="lost"),
    "save": m.Save(line=LINE, version=1, blocks=(0,)),
    "fenced": m.Fenced(why="late"),
    "finished": m.Finished(why="over", completed=True),
}
"""One message of each kind, of the member's own line; what it answers in each phase is the table below."""

IGNORED, DEFERRED = "ignored", "deferred"
OF_STEPS = (
    *("begin", "joined", "reroute", "gone", "settled", "evict", "plan", "prove", "testify"),
    *("commit", "save"),
)
"""What is said of steps: mostly it answers only to some of it."""

ANSWERS = {
    Phase.JOINING: {
        **dict.fromkeys(OF_STEPS, IGNORED),
        "rolled_back": IGNORED,
        "fetch": IGNORED,
        "welcome": "Choose",
        "refused": "Choose",
        "granted": "Prepare",
        "fenced": "Leave",
        "finished": "Stop",
    },
    Phase.PREPARING: {
        **dict.fromkeys(OF_STEPS, IGNORED),
        "rolled_back": IGNORED,
        "refused": IGNORED,
        "fetch": IGNORED,
        "welcome": "Choose",
        "granted": "Prepare",
        "fenced": "Leave",
        "finished": "Stop",
    },
    Phase.SYNCING: {
        **dict.fromkeys(OF_STEPS, IGNORED),
        "refused": IGNORED,
        "begin": "Tell prepared",
        "rolled_back": "Tell prepared",
        "fetch": "FetchState",
        "welcome": "Choose",
        "granted": "Prepare",
        "fenced": "Leave",
        "finished": "Stop",
    },
    Phase.READY: {
        **dict.fromkeys(OF_STEPS, IGNORED),
        "refused": IGNORED,
        "begin": "RunForward",
        "rolled_back": "Tell prepared",
        "fetch": "FetchState",
        "welcome": "Choose",
        "granted": "Prepare",
        "fenced": "Leave",
        "finished": "Stop",
    },
    Phase.TRAINING: {
        **dict.fromkeys(OF_STEPS, IGNORED),
        "refused": IGNORED,
        "testify": "TestifyParts",
        "commit": "EndStep, Tell prepared",
        "rolled_back": "EndStep, Tell prepared",
        "fetch": "EndStep, FetchState",
        "welcome": "EndStep, Choose",
        "granted": "EndStep, Prepare",
        "fenced": "Leave",
        "finished": "EndStep, Stop",
    },
    Phase.REDUCING: {
        **dict.fromkeys(OF_STEPS, IGNORED),
        "refused": IGNORED,
        "evict": "Drop",
        "prove": "ProveSums",
        "testify": "TestifyParts",
        "commit": "ApplyUpdate, ApplyUpdate",
        "rolled_back": "EndStep, Tell prepared",
        "fetch": "EndStep, FetchState",
        "welcome": "EndStep, Choose",
        "granted": "EndStep, Prepare",
        "fenced": "Leave",
        "finished": "EndStep, Stop",
    },
    Phase.APPLYING: {
        **dict.fromkeys(OF_STEPS, DEFERRED),
        **dict.fromkeys(("welcome", "granted", "refused", "fetch"), DEFERRED),
        "rolled_back": "EndStep, Tell prepared",
        "fenced": "Leave",
        "finished": "EndStep, Stop",
    },
}


def names(effects):
    """Effects by name, as in ANSWERS."""
    shown = []
    for effect in effects:
        inner = effect.effect if isinstance(effect, InStep) else effect
        kind = f" {inner.message.kind}" if isinstance(inner, e.Tell) else ""
        shown.append(type(inner).__name__ + kind)
    return ", ".join(shown)


@pytest.mark.parametrize("phase", ANSWERS, ids=lambda phase: phase.value)
def test_every_message_has_its_answer_in_every_phase(phase):
    assert ANSWERS[phase].keys() == MESSAGES.keys()
    for kind, answer in ANSWERS[phase].items():
        member = member_in(phase)
        effects = member.receive(MESSAGES[kind])
        expected = "" if answer in (IGNORED, DEFERRED) else answer
        assert names(effects) == expected, kind
        if answer == DEFERRED:
            assert member.phase is Phase.APPLYING


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.STOPPED])
def test_messages_of_an_older_line_change_nothing(phase):
    for kind, message in MESSAGES.items():
        if kind not in ("welcome", "granted", "refused", "fenced", "finished"):
            member = member_in(phase)
            assert member.receive(message.model_copy(update={"line": OLD})) == [], kind
            assert member.phase is phase
            assert member.line == LINE


def test_a_life_from_the_handshake_to_the_second_step():
    member = new_member()
    assert names(member.receive(welcome())) == "Choose"
    assert names(member.life.chosen(place())) == "Tell claim"
    assert member.receive(m.Granted(line=LINE, begin=0, end=2)) == [e.Prepare(0, 2)]
    assert names(member.life.prepared(1e9)) == "Tell prepared"
    assert names(member.receive(fetch())) == "FetchState"
    (ready,) = member.life.loaded(LINE, 3, DIGESTS)
    assert (ready.message.version, [h.digest for h in ready.message.held]) == (3, list(DIGESTS.values()))
    member.receive(begin())
    loss_made(member)
    vote = reduced(member)
    assert [b.digest for b in vote.blocks] == ["gradient 0", "gradient 1"]
    applying = member.receive(commit())
    assert [(x.effect.block, x.effect.gradient) for x in applying] == [(0, e.SlotSum(0)), (1, e.SlotSum(0))]
    assert member.receive(begin(step=4)) == []
    assert member.applied(STEP, 0, "next 0") == []
    effects = member.applied(STEP, 1, "next 1")
    assert names(effects) == "RecordApplied, Tell applied, EndStep, RunForward"
    assert effects[0].states == {0: "next 0", 1: "next 1"}
    assert (member.version, member.phase, member.loss) == (4, Phase.TRAINING, 0.5)


def test_tensors_before_begin_and_before_plan_are_held_back():
    member = member_in(Phase.READY)
    other = Origin("other", 1, STEP)
    assert member.work.activation(other, Bundle(5, ROUTE, 0), "early") == []
    told = begin().model_copy(
        update={"roster": {ME: (0, 2), "other": (0, 2)}, "incarnations": {ME: 7, "other": 1}}
    )
    runs = [x.effect.key.id for x in member.receive(told)]
    assert runs == [0, 5]
    assert member.work.part(Origin(ME, 7, STEP, 1), 0, 0, "part") == []
    (summing,) = member.receive(plan())
    assert summing.effect.parts == ("part",)


@pytest.mark.parametrize(
    "origin",
    [
        Origin("other", 1, OLD_STEP),
        Origin("other", 1, e.StepId(LINE, 2)),
        Origin("gone", 1, STEP),
        Origin(ME, 6, STEP),
    ],
    ids=["older line", "older step", "older than who left", "older incarnation"],
)
def test_fenced_tensors_are_released(origin):
    member = member_in(Phase.READY)
    with_one_more = {"roster": {ME: (0, 2), "gone": (0, 2)}, "incarnations": {ME: 7, "gone": 2}}
    member.receive(begin().model_copy(update=with_one_more))
    member.receive(m.Gone(line=LINE, peers=("gone",)))
    assert member.work.activation(origin, Bundle(0, ROUTE, 0), "x") == [p.Release("x")]
    assert member.work.gradient(origin, 0, 1, "x") == [p.Release("x")]


def test_who_is_not_in_the_roster_is_heard_once_it_has_introduced_itself():
    member = member_in(Phase.TRAINING)
    late = Origin("late", 1, STEP)
    assert not member.work.knows(late)
    assert member.work.activation(late, Bundle(5, ROUTE, 0), "x") == []
    (run,) = member.work.introduced(late, (1, 2))
    assert member.work.knows(late)
    assert run.effect.key == p.TaskKey(5, 0)
    assert member.work.introduced(Origin("later", 1, e.StepId(LINE, 4)), (1, 2)) == []


def test_the_coordinator_makes_known_who_came_in_and_an_older_life_is_not_believed():
    member = member_in(Phase.TRAINING)
    entrant = m.Entrant(peer="late", incarnation=3, begin=1, end=2)
    told = m.Joined(line=LINE, step=STEP.number, entrants=(entrant,))
    member.receive(told)
    assert member.work.knows(Origin("late", 3, STEP))
    member.receive(m.Gone(line=LINE, peers=("late",)))
    member.work.introduced(Origin("late", 2, STEP), (1, 2))
    assert not member.work.knows(Origin("late", 2, STEP))
    member.work.introduced(Origin("late", 3, STEP), (1, 2))
    assert member.work.knows(Origin("late", 3, STEP))


def test_a_step_is_entered_again_under_a_name_of_its_own():
    """What the worker still did for the first entry is not taken for work of the second."""
    member = member_in(Phase.TRAINING)
    member.receive(welcome(member=True))
    assert member.receive(begin()) == []
    member.receive(begin().model_copy(update={"entry": 2}))
    again = STEP._replace(entry=2)
    assert (member.work.step, again.on_wire) == (again, STEP)
    assert member.work.forward_done(STEP, p.TaskKey(0, 0), "x", None) == [p.Release("x")]
    assert member.work.knows(Origin(ME, 7, STEP))


def test_a_part_of_an_older_plan_is_released():
    member = member_in(Phase.REDUCING)
    member.receive(plan(number=2))
    old, held = Origin(ME, 7, STEP, 1), Origin(ME, 7, STEP, 3)
    assert member.work.part(old, 0, 0, "old") == [p.Release("old")]
    assert member.work.part(held, 0, 0, "newer") == []
    assert p.Release("newer") not in member.receive(plan(number=3))


def test_who_has_voted_says_what_it_has_sent_and_got_of_its_own_blocks_under_the_latest_plan():
    member = member_in(Phase.TRAINING)
    loss_made(member)
    reduced(member, plan(receivers=(ME, "other")))
    (proved,) = member.receive(MESSAGES["prove"])
    assert proved.effect.slots == {0: 0, 1: 0}
    assert {block: [handle for _, handle in own] for block, own in proved.effect.sums.items()} == {
        0: ["result 0"],
        1: ["result 1"],
    }
    assert member.receive(MESSAGES["prove"].model_copy(update={"plan": 0})) == []
    member.receive(plan(number=2))
    assert member.receive(MESSAGES["prove"].model_copy(update={"plan": 2})) == [], "it has not voted"


@pytest.mark.parametrize("taken", [(), (1,)], ids=["nothing", "block 1"])
def test_a_sum_that_lies_in_a_slot_is_not_applied_once_the_slot_has_changed(taken):
    """No coordinator takes away ids that it has planned with; if one did, we would ask for the state."""
    member = member_in(Phase.REDUCING)
    member.receive(m.Evict(line=LINE, step=STEP.number, blocks=taken))
    effects = member.receive(commit())
    assert names(effects) == ("EndStep, Tell prepared" if taken else "ApplyUpdate, ApplyUpdate")


def test_an_inspection_of_a_slot_that_comes_late_is_of_no_use():
    member = member_in(Phase.REDUCING)
    vote = m.BlockVote(block=0, digest="gradient 0", squared_norm=1.0, finite=True)
    member.receive(plan(number=2))
    assert member.work.inspected(STEP, 1, vote, e.SlotSum(0)) == [], "of another plan"
    member.receive(m.RolledBack(line=NEW, version=0, why="lost"))
    assert member.work.inspected(STEP, 2, vote, e.SlotSum(0)) == [], "of a step that is over"


def test_a_route_that_is_not_ours_is_refused():
    member = member_in(Phase.TRAINING)
    for route in ((("other", 0, 2),), ((ME, 0, 3),), ((ME, 2, 2),)):
        hops = tuple(Hop(*hop) for hop in route)
        assert member.work.activation(Origin(ME, 7, STEP), Bundle(0, hops, 0), "x") == [p.Release("x")]


def test_work_of_a_dropped_step_is_released():
    member = member_in(Phase.TRAINING)
    member.receive(m.RolledBack(line=NEW, version=0, why="lost"))
    key = p.TaskKey(0, 0)
    shard = e.Shard(1, 0, 0, 0, 10, ME)
    vote = m.BlockVote(block=0, digest="", squared_norm=0.0, finite=True)
    assert member.work.forward_done(STEP, key, "x", None) == [p.Release("x")]
    assert member.work.backward_done(STEP, key, "x") == [p.Release("x")]
    assert member.work.work_failed(STEP, key, "why") == []
    assert member.work.summed(STEP, shard, "x") == [p.Release("x")]
    assert member.work.inspected(STEP, 1, vote, "x") == [p.Release("x")]
    assert member.applied(STEP, 0, "digest") == []
    assert member.work.unreachable("other") == []


def test_a_voter_that_missed_the_commit_applies_it_and_is_ready():
    member = member_in(Phase.REDUCING)
    reign = m.TermView(term=3, view=1)
    effects = member.receive(welcome(line=reign, version=4, member=True, commit=commit()))
    assert names(effects) == "ApplyUpdate, ApplyUpdate"
    member.applied(STEP, 0, "next 0")
    effects = member.applied(STEP, 1, "next 1")
    assert effects[0].step == STEP
    assert names(effects).endswith("Tell ready")
    assert effects[-1].message.line == reign


@pytest.mark.parametrize(
    "missed",
    [
        commit(plan_number=2),
        commit(digests={0: "another", 1: "gradient 1"}),
        commit(line=m.TermView(term=1, view=1)),
    ],
    ids=["another plan", "other bits", "another reign"],
)
def test_a_commit_that_is_not_ours_to_apply_is_fetched(missed):
    member = member_in(Phase.REDUCING)
    reign = m.TermView(term=3, view=1)
    effects = member.receive(welcome(line=reign, version=4, member=True, commit=missed))
    assert names(effects) == "EndStep, Tell prepared"


def test_a_state_of_another_history_is_not_trusted_though_its_number_fits():
    """A roll-back was missed: version 3 of the new view has other bits than ours."""
    member = member_in(Phase.READY)
    effects = member.receive(welcome(line=m.TermView(term=3, view=2), version=3, member=True))
    assert names(effects) == "Tell prepared"
    assert member.version is None
    member = member_in(Phase.READY)
    effects = member.receive(welcome(line=m.TermView(term=3, view=1), version=3, member=True))
    assert names(effects) == "Tell ready"


def test_while_a_state_is_loaded_nothing_is_vouched_for():
    member = member_in(Phase.READY)
    member.receive(fetch(version=4))
    (hello,) = member.connected()
    assert hello.message.held == ()
    assert member.life.loaded(LINE, 3, DIGESTS) == []
    assert member.life.loaded(OLD, 4, DIGESTS) == []
    assert names(member.life.loaded(LINE, 4, DIGESTS)) == "Tell ready"


def test_a_fetch_of_what_is_held_needs_no_transfer():
    member = member_in(Phase.READY)
    assert names(member.receive(fetch())) == "Tell ready"
    differs = fetch().model_copy(update={"digests": {0: "another"}})
    assert names(member.receive(differs)) == "FetchState"


def test_graphs_that_are_loaded_are_not_loaded_again():
    member = member_in(Phase.SYNCING)
    assert names(member.receive(welcome())) == "Choose"
    assert names(member.receive(m.Granted(line=LINE, begin=0, end=2))) == "Tell prepared"
    assert member.receive(m.Granted(line=LINE, begin=1, end=2)) == [e.Prepare(1, 2)]
    member.receive(welcome())
    assert member.receive(m.Granted(line=LINE, begin=1, end=2)) == []
    assert names(member.life.prepared(1e9)) == "Tell prepared"


def test_a_place_is_offered_only_when_its_graphs_are_loaded():
    for phase, offered in ((Phase.PREPARING, None), (Phase.SYNCING, (0, 2)), (Phase.READY, (0, 2))):
        (hello,) = member_in(phase).connected()
        assert hello.message.place == offered
    member = member_in(Phase.PREPARING)
    member.reborn(8)
    (hello,) = member.connected()
    assert (hello.message.place, hello.message.incarnation) == (None, 8)


def test_reborn_trusts_nothing_it_held():
    member = member_in(Phase.TRAINING)
    assert names(member.receive(m.Fenced(why="late"))) == "Leave"
    assert names(member.reborn(8)) == "EndStep"
    (hello,) = member.connected()
    assert (hello.message.incarnation, hello.message.held) == (8, ())


def test_going_back_while_applying_forgets_the_half_applied_state():
    member = member_in(Phase.APPLYING)
    member.receive(begin(step=4))
    member.applied(STEP, 0, "next 0")
    member.receive(m.RolledBack(line=NEW, version=3, why="lost"))
    assert member.version is None
    assert member.applied(STEP, 1, "next 1") == []
    assert names(member.receive(fetch(line=NEW))) == "FetchState"


def test_going_back_to_where_we_are_keeps_the_state():
    member = member_in(Phase.TRAINING)
    effects = member.receive(m.RolledBack(line=NEW, version=3, why="steps are begun anew"))
    assert names(effects) == "EndStep, Tell ready", "it says so at once: nobody else may have it either"
    assert effects[-1].message.version == 3
    assert names(member.receive(fetch(line=NEW))) == "Tell ready"


def test_after_the_decision_no_work_is_begun():
    member = member_in(Phase.APPLYING)
    assert member.work.activation(Origin(ME, 7, STEP), Bundle(9, ROUTE, 0), "x") == []


def test_a_spoiled_slot_is_dropped_and_reported():
    member = member_in(Phase.TRAINING)
    key = p.TaskKey(0, 0)
    member.work.forward_done(STEP, key, None, 0.5)
    effects = member.work.work_failed(STEP, key, "x" * 900)
    assert [x.effect for x in effects if isinstance(x, InStep) and isinstance(x.effect, Drop)] == [
        Drop(0, 0),
        Drop(1, 0),
    ]
    (told,) = [x.message for x in effects if isinstance(x, e.Tell)]
    assert (told.kind, told.id, len(told.why)) == ("failed", 0, 500)


def test_who_sends_a_bundle_that_is_none_is_named_in_its_own_step_alone():
    member = member_in(Phase.TRAINING)
    (told,) = member.work.unread(Origin(ME, 7, STEP), 1, 0, "noise", back=False)
    assert (told.message.kind, told.message.id, told.message.given) == ("failed", 1, ME)
    assert member.work.unread(Origin(ME, 6, STEP), 1, 0, "noise", back=False) == [], "in a former life"
    assert member.work.unread(Origin(ME, 7, OLD_STEP), 1, 0, "noise", back=False) == []


def test_checkpoints_are_saved_from_the_version_that_was_asked_for():
    member = member_in(Phase.READY)
    assert member.receive(m.Save(line=LINE, version=3, blocks=(1,))) == [
        e.SaveState(LINE, 3, {1: DIGESTS[1]})
    ]
    assert member.receive(m.Save(line=LINE, version=2, blocks=(1,))) == []


def test_a_copy_is_ordered_by_what_it_is_of_though_the_state_is_given_up_behind_it():
    """A cluster falls apart while its members apply what it is to store: both messages wait, and are
    answered at once.
    """
    member = member_in(Phase.APPLYING)
    member.receive(m.Save(line=LINE, version=STEP.number + 1, blocks=(0, 1)))
    elsewhere = LINE.model_copy(update={"cluster": m.EVERYBODY})
    member.receive(welcome(line=elsewhere))
    member.applied(STEP, 0, "new 0")
    effects = member.applied(STEP, 1, "new 1")
    assert member.version is None
    orders = [effect for effect in effects if isinstance(effect, e.SaveState)]
    assert orders == [e.SaveState(LINE, STEP.number + 1, {0: "new 0", 1: "new 1"})]


def test_rejection_stops_with_its_reason():
    (stop,) = new_member().receive(m.Rejected(reason="version", why="too old"))
    assert stop == e.Stop("too old", completed=False, rejected="version")


def two_hops():
    """A step whose second block another volunteer is to run, though we could."""
    task = m.Task(id=0, route=((ME, 0, 1), ("other", 1, 2)))
    roster = {ME: (0, 2), "other": (1, 2)}
    return begin().model_copy(
        update={"roster": roster, "incarnations": {ME: 7, "other": 1}, "tasks": (task,)}
    )


def test_a_link_that_was_congested_before_the_step_began_gets_nothing_until_it_is_relieved():
    member = member_in(Phase.READY)
    assert member.work.congested("other", 1) == []
    assert names(member.receive(two_hops())) == ""
    assert member.work.congested("other", 2) != []  # this one has one block left
    member = member_in(Phase.READY)
    member.work.congested("other", 0)
    member.receive(two_hops())
    assert names(member.work.congested("other", None)) == "RunForward"


def test_whom_we_refuse_gets_no_tasks_in_any_step_until_we_do_not():
    for refused in (True, False):
        member = member_in(Phase.READY)
        assert member.work.refused("other", True) == [], "there is no step in which it takes part"
        member.work.reachable("other")  # that its line is good changes nothing
        if not refused:
            assert member.work.refused("other", False) == []
        begun = member.receive(two_hops())
        assert (e.Tell(m.Shuns(peers=("other",))) in begun) is refused, "nobody else would know"
        (send,) = member.work.forward_done(STEP, p.TaskKey(0, 0), "out", None)
        assert send.effect.route[0].peer == (ME if refused else "other")
        told = member.work.refused("other", not refused)
        assert told[0] == e.Tell(m.Shuns(peers=() if refused else ("other",)))


def test_that_we_work_with_somebody_again_is_said_though_it_was_so_between_two_steps():
    member = member_in(Phase.READY)
    member.receive(two_hops())
    member.work.refused("other", True)
    member.work.drop_all()
    assert member.work.refused("other", False) == []
    assert e.Tell(m.Shuns()) in member.receive(two_hops().model_copy(update={"entry": 1}))


def test_a_nudge_counts_only_in_its_step_and_from_who_is_in_it():
    member = member_in(Phase.READY)
    member.receive(two_hops())
    member.work.forward_done(STEP, p.TaskKey(0, 0), "out", None)
    route = (Hop(ME, 0, 1), Hop("other", 1, 2))
    for origin in (Origin("other", 2, STEP), Origin("other", 1, e.StepId(LINE, 9))):
        assert member.work.nudge(origin, 0, route, 1) == []
    assert names(member.work.nudge(Origin("other", 1, STEP), 0, route, 1)) == "SendActivation"


def test_what_a_session_said_during_an_update_ends_with_it():
    """Another place was granted; the next session does not know of it, as we say that we have the old one."""
    member = member_in(Phase.APPLYING)
    assert member.receive(m.Granted(line=LINE, begin=0, end=1)) == []
    (hello,) = member.connected()
    assert hello.message.place == (0, 2)
    for block in (0, 1):
        member.applied(STEP, block, f"state {block}")
    assert member.place == (0, 2)
