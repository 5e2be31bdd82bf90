"""An averaging as a member lives it: a step of its own cluster, named by its group among others."""

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import InStep
from hetpeer.averaging.member.member_life import Phase
from hetpeer.averaging.member.position import Origin
from hetpeer.stages.pipeline.effects import Release
from tests.averaging.rig import DIGESTS, LINE, ME, STEP, member_in, new_member, place, welcome

GROUP = 5
WIRE = e.StepId(m.TermView(term=LINE.term, view=0, cluster=m.EVERYBODY), GROUP)
THERE = "member of another cluster"
AT = e.StepId(LINE, STEP.number, group=GROUP)


def begin():
    return m.Begin(
        line=LINE,
        step=STEP.number,
        batch=0,
        group=GROUP,
        microbatches=0,
        roster={ME: (0, 2), THERE: (0, 2)},
        incarnations={ME: 7, THERE: 1},
        tasks=(),
    )


def plan(number=1):
    covers = tuple(
        m.Cover(block=b, slots=((ME, (0,)), (THERE, (3,))), reducers=((ME, 1),), receivers=(ME, THERE))
        for b in (0, 1)
    )
    return m.Plan(line=LINE, step=STEP.number, group=GROUP, plan=number, covers=covers)


def averaging():
    member = member_in(Phase.READY)
    assert member.receive(begin()) == []
    return member


def inner(effects):
    return [x.effect for x in effects if isinstance(x, InStep)]


def test_it_sends_its_parameters_and_installs_the_mean():
    member = averaging()
    member.loss = 3.5
    assert member.work.step.on_wire == WIRE
    uplink, *parts = inner(member.receive(plan()))
    assert isinstance(uplink, e.ShareUplink)
    assert set(uplink.elements) == {THERE}
    assert {(part.shard.block, part.slot) for part in parts} == {(0, e.STATE), (1, e.STATE)}
    told = []
    for part in parts:
        shard = part.shard
        assert member.work.part(Origin(ME, 7, WIRE, 1), shard.block, shard.index, "mine") == []
        (summing,) = inner(member.work.part(Origin(THERE, 1, WIRE, 1), shard.block, shard.index, "theirs"))
        assert summing.parts == ("mine", "theirs"), "in the plan's order"
        sent = inner(member.work.summed(AT, shard, "sum"))
        assert {x.to for x in sent if isinstance(x, e.SendResult)} == {ME, THERE}
        member.work.result(Origin(ME, 7, WIRE, 1), shard.block, shard.index, "result", shard.length)
        vote = m.BlockVote(block=shard.block, digest=f"sum {shard.block}", squared_norm=1.0, finite=True)
        told += member.work.inspected(AT, 1, vote, f"sum {shard.block}")
    assert [x.message.kind for x in told if isinstance(x, e.Tell)][-1] == "vote"
    commit = m.Commit(
        line=LINE,
        step=STEP.number,
        group=GROUP,
        plan=1,
        coefficient=0.5,
        loss=None,
        digests={0: "sum 0", 1: "sum 1"},
    )
    installs = inner(member.receive(commit))
    needed = STEP.number + 1
    assert installs == [e.InstallAverage(b, 1, STEP.number, f"sum {b}", 0.5, needed) for b in (0, 1)]
    member.applied(AT, 0, "after 0")
    effects = member.applied(AT, 1, "after 1")
    assert isinstance(effects[0], e.RecordApplied)
    assert (member.version, member.phase) == (STEP.number + 1, Phase.READY)
    assert member.loss == 3.5, "of the last batch: a mean of parameters has none"


def test_a_plan_that_takes_it_for_another_cluster_gets_nothing():
    member = averaging()
    wrong = plan()
    covers = tuple(c.model_copy(update={"slots": ((ME, (1,)), (THERE, (3,)))}) for c in wrong.covers)
    effects = inner(member.receive(wrong.model_copy(update={"covers": covers})))
    assert not [effect for effect in effects if isinstance(effect, e.SendPart)]


def test_parts_that_come_before_the_group_is_known_wait_and_those_of_a_past_one_do_not():
    member = member_in(Phase.READY)
    assert member.work.part(Origin(THERE, 1, WIRE, 1), 0, 0, "early") == []
    member.receive(begin())
    effects = member.receive(plan())
    assert Release("early") not in effects
    past = e.StepId(WIRE.line, GROUP - 1)
    assert member.work.part(Origin(THERE, 1, past, 1), 0, 0, "late") == [Release("late")]


def test_tensors_of_another_clusters_steps_are_not_taken():
    member = member_in(Phase.READY)
    other = e.StepId(LINE.model_copy(update={"cluster": 3, "term": 99}), 1000)
    assert member.work.gradient(Origin(THERE, 1, other), 0, 1, "foreign") == [Release("foreign")]


def test_whoever_has_no_place_is_on_the_line_of_everybody_until_it_has_one():
    member = new_member()
    door = m.TermView(term=LINE.term, view=0, cluster=m.EVERYBODY)
    (choose,) = member.receive(welcome(line=door, places=(place(cluster=4),)))
    assert choose.places[0].cluster == 4
    mine = LINE.model_copy(update={"cluster": 4})
    assert member.receive(m.Granted(line=mine, begin=0, end=2)) == [e.Prepare(0, 2)]
    assert member.line == mine
    again = m.Granted(line=mine.model_copy(update={"cluster": 5}), begin=0, end=1)
    assert member.receive(again) == [e.Prepare(0, 1)], "those that wait are divided anew"
    assert member.line == again.line
    late = mine.model_copy(update={"term": LINE.term - 1})
    assert member.receive(m.Granted(line=late, begin=0, end=2)) == [], "of a term that is past"
    assert member.line == again.line


def test_a_state_of_another_cluster_is_not_vouched_for():
    member = member_in(Phase.READY)
    assert member.life.position.digests == DIGESTS
    member.receive(welcome(line=LINE.model_copy(update={"cluster": 4}), member=True))
    assert member.version is None


def step_begin(number):
    return m.Begin(
        line=LINE,
        step=number,
        batch=9,
        microbatches=1,
        roster={ME: (0, 2)},
        incarnations={ME: 7},
        tasks=(),
    )


def decided(step):
    return m.Commit(
        line=LINE,
        step=step,
        group=GROUP,
        plan=1,
        coefficient=0.5,
        loss=None,
        digests={0: "sum 0", 1: "sum 1"},
    )


def voted_beside_a_step():
    """A member that trains step STEP.number while the copies of its blocks are averaged, and has voted on
    the sums.
    """
    member = member_in(Phase.READY)
    copies = inner(member.receive(begin().model_copy(update={"delayed": True})))
    assert copies == [e.KeepCopy(0), e.KeepCopy(1)]
    assert member.phase is Phase.READY
    member.receive(step_begin(STEP.number))
    assert member.phase is Phase.TRAINING
    _, *parts = inner(member.receive(plan()))
    assert {part.slot for part in parts} == {e.COPY}
    for part in parts:
        shard = part.shard
        member.work.part(Origin(ME, 7, WIRE, 1), shard.block, shard.index, "mine")
        member.work.part(Origin(THERE, 1, WIRE, 1), shard.block, shard.index, "theirs")
        member.work.summed(AT, shard, "sum")
        member.work.result(Origin(ME, 7, WIRE, 1), shard.block, shard.index, "result", shard.length)
        vote = m.BlockVote(block=shard.block, digest=f"sum {shard.block}", squared_norm=1.0, finite=True)
        told = member.work.inspected(AT, 1, vote, f"sum {shard.block}")
    (vote,) = told
    assert (vote.message.kind, vote.message.group) == ("vote", GROUP)
    assert member.phase is Phase.TRAINING
    return member


def test_a_delayed_averaging_goes_beside_a_step_and_is_installed_between_two():
    member = voted_beside_a_step()
    assert member.receive(m.Gone(line=LINE, group=GROUP + 1, peers=(THERE,))) == []
    member.life.position.version = STEP.number + 1  # the step was committed and applied
    ended, *installs = member.receive(decided(STEP.number + 1))
    assert isinstance(ended, e.EndStep)
    assert inner(installs) == [
        e.InstallAverage(b, 1, STEP.number + 1, f"sum {b}", 0.5, needed=STEP.number + 2) for b in (0, 1)
    ]
    member.applied(AT, 0, "after 0")
    record, _, ended = member.applied(AT, 1, "after 1")
    assert (record.step.number, record.step.group) == (STEP.number + 1, GROUP)
    assert ended == e.EndStep(AT)
    assert (member.version, member.phase) == (STEP.number + 2, Phase.READY)


def behind_the_mean(**more):
    """Begin of a step that follows the one in progress and the mean."""
    return step_begin(STEP.number + 2).model_copy(update={"behind": 2} | more)


def test_a_mean_is_installed_between_two_steps_that_overlap():
    member = voted_beside_a_step()
    member.receive(behind_the_mean(mean=STEP.number + 1))
    assert [step.id.number for step in member.work.steps] == [STEP.number, STEP.number + 2]
    first = member.work.steps[0]
    member.work.drop_step(first)  # it was committed and applied
    member.life.position.version = STEP.number + 1
    installs = member.receive(decided(STEP.number + 1))
    assert inner(installs) == [
        e.InstallAverage(b, 1, STEP.number + 1, f"sum {b}", 0.5, needed=STEP.number) for b in (0, 1)
    ], "the step behind it is computed with the parameters that it began with"
    assert len(installs) == 2, "and goes on"
    member.applied(AT, 0, "after 0")
    member.applied(AT, 1, "after 1")
    assert (member.version, member.phase) == (STEP.number + 2, Phase.TRAINING)
    assert [step.id.number for step in member.work.steps] == [STEP.number + 2]


def test_a_step_behind_something_else_than_the_steps_in_progress_is_not_begun():
    member = voted_beside_a_step()
    effects = member.receive(behind_the_mean())
    assert (member.phase, member.work.steps) == (Phase.SYNCING, [])
    assert e.EndStep(AT) in effects


def test_it_is_not_installed_into_another_version():
    member = voted_beside_a_step()
    effects = member.receive(decided(STEP.number + 1))
    assert [x for x in effects if isinstance(x, InStep)] == []
    assert member.phase is Phase.SYNCING


def test_a_new_reign_forgets_what_was_averaged_unless_it_says_that_it_is_decided():
    member = voted_beside_a_step()
    later = LINE.model_copy(update={"term": LINE.term + 1})
    effects = member.receive(welcome(line=later, member=True, version=STEP.number))
    assert e.EndStep(AT) in effects
    assert member.phase is Phase.READY
    member = voted_beside_a_step()
    told = welcome(line=later, member=True, version=STEP.number + 1, commit=decided(STEP.number))
    assert {type(x) for x in inner(member.receive(told))} == {e.InstallAverage}
