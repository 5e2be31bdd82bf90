"""One volunteer alone: a member core brought to any phase by the messages of a real handshake and step.

Its place are blocks 0 and 1 of a model of two, one microbatch a step, so that it is first hop, last hop and
reducer.
"""

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import InStep
from hetpeer.averaging.member.member import Member
from hetpeer.averaging.member.member_life import Phase
from hetpeer.averaging.member.position import Origin
from hetpeer.averaging.member.step_vote import ModelShape
from hetpeer.stages.pipeline import effects as p

ME, LINE = "me", m.TermView(term=2, view=1)
PLACE = (0, 2)
DIGESTS = {0: "state 0", 1: "state 1"}
STEP = e.StepId(LINE, 3)


def place(begin=0, end=2, cluster=0):
    return m.Place(cluster=cluster, begin=begin, end=end, memory_bytes=1, flops=1.0, holders=0, open=True)


def new_member():
    hello = m.Hello(run="run", incarnation=7)
    member = Member(ME, hello, ModelShape({0: 10, 1: 20}, slot_capacity=2))
    member.connected()
    return member


def welcome(**changes):
    known = {"line": LINE, "version": STEP.number, "member": False, "places": (place(),)}
    return m.Welcome(**(known | changes))


def begin(step=STEP.number, line=LINE):
    return m.Begin(
        line=line,
        step=step,
        batch=0,
        microbatches=1,
        roster={ME: PLACE},
        incarnations={ME: 7},
        tasks=(m.Task(id=0, route=((ME, 0, 2),)),),
    )


def plan(number=1, ids=(0,), receivers=(ME,)):
    covers = tuple(
        m.Cover(block=b, slots=((ME, ids),), reducers=((ME, 1),), receivers=receivers) for b in (0, 1)
    )
    return m.Plan(line=LINE, step=STEP.number, plan=number, covers=covers)


def commit(plan_number=1, digests=None, line=LINE):
    return m.Commit(
        line=line,
        step=STEP.number,
        plan=plan_number,
        coefficient=1.0,
        loss=0.5,
        digests=digests or {0: "gradient 0", 1: "gradient 1"},
    )


def fetch(version=STEP.number, line=LINE):
    return m.Fetch(line=line, version=version, sources={0: ("other",), 1: ("other",)}, digests={})


def loss_made(member):
    """Forward and backward of the one microbatch; the coordinator counts it."""
    key = p.TaskKey(0, 0)
    member.work.forward_done(STEP, key, None, 0.5)
    member.work.backward_done(STEP, key, None)
    member.receive(m.Settled(line=LINE, step=STEP.number, slot=0))


def reduced(member, given=None):
    """All of plan 1 (`given`) up to our vote; returns the vote."""
    effects = member.receive(given or plan())
    told, at = [], Origin(ME, 7, STEP, 1)
    for work in [x.effect for x in effects if isinstance(x, InStep)]:
        if isinstance(work, e.InspectSlot):
            block, total = work.block, e.SlotSum(work.slot)
        elif isinstance(work, e.ShareUplink):
            continue
        else:
            block, total = work.shard.block, f"gradient {work.shard.block}"
            (summing,) = member.work.part(at, block, work.shard.index, f"part {block}")
            member.work.summed(STEP, summing.effect.shard, f"sum {block}")
            member.work.result(at, block, work.shard.index, f"result {block}", work.shard.length)
        vote = m.BlockVote(block=block, digest=f"gradient {block}", squared_norm=1.0, finite=True)
        told += member.work.inspected(STEP, 1, vote, total)
    return told[0].message


def member_in(phase):
    """A member in `phase`: on LINE, and from READY on at version STEP.number."""
    member = new_member()
    stages = [
        (Phase.JOINING, lambda: member.receive(welcome())),
        (Phase.PREPARING, lambda: member.receive(m.Granted(line=LINE, begin=0, end=2))),
        (Phase.SYNCING, lambda: (member.life.prepared(1e9), member.receive(fetch()))),
        (Phase.READY, lambda: member.life.loaded(LINE, STEP.number, DIGESTS)),
        (Phase.TRAINING, lambda: member.receive(begin())),
        (Phase.REDUCING, lambda: (loss_made(member), reduced(member))),
        (Phase.APPLYING, lambda: member.receive(commit())),
    ]
    if phase is Phase.STOPPED:
        member.receive(m.Finished(why="over", completed=True))
        return member
    for reached, advance in stages:
        advance()
        assert member.phase is reached
        if reached is phase:
            return member
    raise AssertionError(phase)
