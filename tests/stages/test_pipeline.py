"""A holder's part of one step, driven by hand: two or three hops, a few microbatches."""

import pytest

from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.gradient_slots import Drop, Merge
from hetpeer.stages.pipeline.pipeline import Pipeline
from hetpeer.stages.pipeline.routes import Hop

ROSTER = {"first": (0, 2), "me": (2, 4), "other": (2, 4), "last": (4, 6)}
ROUTE = (Hop("me", 2, 4), Hop("last", 4, 6))


def pipeline(me="me", capacity=4, roster=ROSTER):
    return Pipeline(me, roster, microbatches=8, slot_capacity=capacity)


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def forward(core, microbatch=0, route=ROUTE, attempt=0):
    """One microbatch up to its activation's departure; returns the effects of the last event."""
    core.activation(microbatch, route, attempt, "first", f"in {microbatch}")
    return core.forward_done(p.TaskKey(microbatch, route[0].begin), f"out {microbatch}", None)


def backward(core, microbatch=0, begin=2, end=4):
    core.gradient(microbatch, end, f"grad {microbatch}")
    return core.backward_done(p.TaskKey(microbatch, begin), f"back {microbatch}")


def test_a_microbatch_passes_and_its_gradient_comes_back():
    core = pipeline()
    (run,) = core.activation(0, ROUTE, 0, "first", "in")
    assert run == p.RunForward(p.TaskKey(0, 2), 4, "in", train=True, hops_after=1)
    (send,) = core.forward_done(run.key, "out", None)
    assert send == p.SendActivation(0, (ROUTE[1],), 0, "out")
    (run,) = core.gradient(0, 4, "grad")
    assert run == p.RunBackward(p.TaskKey(0, 2), 4, "grad", 0, (2, 3))
    effects = core.backward_done(run.key, "back")
    assert effects[:2] == [p.Release("in"), p.Release("grad")]
    assert of(p.SendGradient, effects) == [p.SendGradient(0, "first", 2, "back")]
    assert of(p.ReportSealed, effects) == [p.ReportSealed(0, {2: (0,), 3: (0,)}, {})]


def test_whoever_waits_for_the_same_gradient_gets_one():
    """An id that came here at two of our blocks, for an earlier attempt and for a later one, leaves over
    the same border twice.
    """
    core = pipeline(roster={"me": (1, 4), "last": (4, 6)})
    forward(core, 0, attempt=0)
    earlier = (Hop("me", 1, 4), ROUTE[1])
    forward(core, 0, earlier, attempt=1)
    effects = core.gradient(0, 4, "grad")
    (send,) = of(p.SendActivation, effects)
    assert (send.id, send.attempt, send.handle) == (0, 1, "out 0")
    (first,) = of(p.RunBackward, effects)
    core.backward_done(first.key, "back")
    (second,) = of(p.RunBackward, core.gradient(0, 4, "the same"))
    assert {first.key, second.key} == {p.TaskKey(0, 2), p.TaskKey(0, 1)}
    assert second.fold == (1,), "the rest of it is in the slot already"


def test_the_last_hop_turns_round_and_reports_its_loss():
    core = pipeline("last")
    core.activation(0, (Hop("last", 4, 6),), 0, "me", "in")
    (run,) = core.forward_done(p.TaskKey(0, 4), None, 1.5)
    assert (run.gradient, run.fold) == (None, (4, 5))
    (report,) = of(p.ReportSealed, core.backward_done(run.key, "back"))
    assert report.losses == {0: 1.5}


def test_evaluation_runs_forward_only_and_reports_at_the_end():
    core = pipeline("last")
    (run,) = core.activation(8, (Hop("last", 4, 6),), 0, "me", "in")
    assert not run.train
    assert core.forward_done(run.key, None, 2.5, (3, 7)) == [
        p.ReportEvaluated(8, 2.5, (3, 7)),
        p.Release("in"),
    ]
    again = core.activation(8, (Hop("last", 4, 6),), 1, "me", "again")
    assert again == [p.Release("again"), p.ReportEvaluated(8, 2.5, (3, 7))]


def test_a_repeated_activation_is_answered_with_what_is_kept():
    core = pipeline()
    forward(core)
    assert core.activation(0, ROUTE, 0, "first", "again") == [p.Release("again")]
    backward(core)
    answer = core.activation(0, ROUTE, 0, "another", "again")
    assert answer == [p.Release("again"), p.SendGradient(0, "another", 2, "back 0")]


def test_a_new_attempt_is_passed_on_and_urges_to_seal():
    core = pipeline()
    forward(core, 0)
    forward(core, 1)
    assert of(p.ReportSealed, backward(core, 0)) == []
    effects = core.activation(1, ROUTE, 1, "first", "again")
    assert p.SendActivation(1, (ROUTE[1],), 1, "out 1") in effects
    (report,) = of(p.ReportSealed, effects)
    assert report.ids == {2: (0,), 3: (0,)}


def test_a_new_route_is_followed_from_where_our_part_ends():
    core = pipeline("first", roster={**ROSTER, "first": (0, 3)})
    core.assign(0, (Hop("first", 0, 3), Hop("me", 3, 4), Hop("last", 4, 6)), 0)
    core.forward_done(p.TaskKey(0, 0), "out", None)
    shorter = (Hop("first", 0, 2), Hop("other", 2, 4), Hop("last", 4, 6))
    (send,) = core.assign(0, shorter, 1)
    assert send.route == (Hop("other", 3, 4), Hop("last", 4, 6))


def test_all_that_a_lost_hop_was_sent_goes_elsewhere_and_rejoins_the_route():
    core = pipeline("first")
    route = (Hop("first", 0, 2), Hop("me", 2, 4), Hop("last", 4, 6))
    for microbatch in (0, 1):
        core.assign(microbatch, route, 0)
        core.forward_done(p.TaskKey(microbatch, 0), f"out {microbatch}", None)
    backward(core, 0, begin=0, end=2)
    sends = core.gone("me")
    assert [(s.id, s.route) for s in sends] == [(n, (Hop("other", 2, 4), Hop("last", 4, 6))) for n in (0, 1)]
    assert core.gone("other") == []


def test_an_unreachable_peer_is_avoided_while_there_is_another():
    core = pipeline("first")
    core.assign(0, (Hop("first", 0, 2), Hop("me", 2, 4), Hop("last", 4, 6)), 0)
    core.forward_done(p.TaskKey(0, 0), "out", None)
    (send,) = core.unreachable("me")
    assert send.route[0].peer == "other"
    (send,) = core.unreachable("other")
    assert send.route[0].peer == "other"
    core.outputs.reachable("me")
    (send,) = core.unreachable("other")
    assert send.route[0].peer == "me"


def test_a_spoiled_slot_takes_back_whatever_was_in_it():
    """Also what another task of the same microbatch had folded at other blocks of ours."""
    core = pipeline()
    route = (Hop("me", 2, 3), Hop("me", 3, 4), Hop("last", 4, 6))
    forward(core, 0, route)
    forward(core, 0, route[1:])
    forward(core, 1, route)
    backward(core, 0, begin=3, end=4)
    backward(core, 0, begin=2, end=3)
    core.gradient(1, 3, "grad 1")
    core.work_failed(p.TaskKey(1, 2), "not finite")
    for begin in (2, 3):
        (run,) = core.activation(0, (Hop("me", begin, 4), Hop("last", 4, 6)), 1, "first", "again")
        assert run.key == p.TaskKey(0, begin)


def test_what_nobody_takes_is_left_over_until_somebody_joins():
    core = pipeline("first", roster={"first": (0, 2), "me": (2, 4), "last": (4, 6)})
    route = (Hop("first", 0, 2), Hop("me", 2, 4), Hop("last", 4, 6))
    for microbatch in (0, 1):
        core.assign(microbatch, route, 0)
        core.forward_done(p.TaskKey(microbatch, 0), f"out {microbatch}", None)
    backward(core, 0, begin=0, end=2)
    assert core.outputs.leftovers() == {}
    assert core.gone("me") == []
    assert core.outputs.leftovers() == {2: (0, 1)}  # the gradients of what was done died with it, too
    sends = core.outputs.joined("new", (2, 5))
    assert [(s.id, s.route) for s in sends] == [(n, (Hop("new", 2, 4), Hop("last", 4, 6))) for n in (0, 1)]
    assert core.outputs.leftovers() == {}


def test_what_was_left_over_and_forgotten_is_not_given_to_who_joins():
    """Its gradient was dropped: the task counts as never done, and comes again. Found by the simulator."""
    core = pipeline()
    forward(core)
    (report,) = of(p.ReportSealed, backward(core))
    core.gone("last")
    assert core.outputs.leftovers() == {4: (0,)}
    core.settled(report.slot, (2, 3))
    assert core.activation(0, ROUTE, 1, "first", "in again") != []
    assert core.outputs.leftovers() == {}
    assert of(p.SendActivation, core.outputs.joined("new", (4, 6))) == []


def test_what_is_missing_further_on_is_left_over_there():
    core = pipeline("first", roster={"first": (0, 2), "me": (2, 4), "last": (4, 6)})
    core.assign(0, (Hop("first", 0, 2), Hop("me", 2, 4), Hop("last", 4, 6)), 0)
    core.gone("last")
    (send,) = core.forward_done(p.TaskKey(0, 0), "out", None)
    assert send.route == (Hop("me", 2, 4), Hop("last", 4, 6))
    assert core.outputs.leftovers() == {}


def test_what_only_an_unreachable_holder_could_take_waits_for_both():
    core = pipeline("first", roster={"first": (0, 2), "me": (2, 4), "last": (4, 6)})
    core.assign(0, (Hop("first", 0, 2), Hop("me", 2, 4), Hop("last", 4, 6)), 0)
    core.forward_done(p.TaskKey(0, 0), "out", None)
    (send,) = core.unreachable("me")
    assert (send.route[0].peer, core.outputs.leftovers()) == ("me", {2: (0,)})
    core.gradient(0, 2, "grad")  # it came through after all
    assert core.outputs.leftovers() == {}


def test_no_backward_starts_while_the_open_slot_is_full_and_another_waits_for_the_coordinator():
    core = pipeline(capacity=1)
    for microbatch in range(3):
        forward(core, microbatch)
    backward(core, 0)
    core.settled(0, ())
    forward(core, 3)
    backward(core, 1)
    backward(core, 2)
    assert core.gradient(3, 4, "grad 3") == []
    assert core.schedule.running == 0
    *merges, sealed, run = core.settled(1, ())
    assert merges == [Merge(2, 1, 0), Merge(3, 1, 0)]
    assert run.key.id == 3
    assert sealed.slot == 2


def test_a_slot_is_not_sealed_while_a_gradient_is_being_folded():
    core = pipeline(capacity=2)
    for microbatch in (0, 1):
        forward(core, microbatch)
    core.gradient(0, 4, "grad 0")
    core.gradient(1, 4, "grad 1")
    assert of(p.ReportSealed, core.backward_done(p.TaskKey(0, 2), "back")) == []
    assert of(p.ReportSealed, core.backward_done(p.TaskKey(1, 2), "back"))


def test_what_was_refused_or_evicted_is_done_again_when_it_is_asked_for():
    core = pipeline(capacity=1)
    forward(core)
    backward(core)
    assert core.settled(0, (3,)) == [Drop(3, 0)]
    (run,) = core.activation(0, ROUTE, 1, "first", "in")
    assert isinstance(run, p.RunForward)
    core.forward_done(run.key, "out", None)
    (run,) = core.gradient(0, 4, "grad")
    assert run.fold == (3,)
    core.backward_done(run.key, "back")
    core.settled(1, ())
    assert core.evict((2,)) == [Drop(2, 0)]
    assert isinstance(core.activation(0, ROUTE, 2, "first", "in")[0], p.RunForward)


def test_a_broken_backward_spoils_what_was_folded_with_it():
    """Both lost their gradients, though only one of them failed: both are done again when they are asked
    for.
    """
    core = pipeline(capacity=4)
    for microbatch in (0, 1):
        forward(core, microbatch)
        core.gradient(microbatch, 4, f"grad {microbatch}")
    effects = core.work_failed(p.TaskKey(0, 2), "non-finite")
    assert of(Drop, effects) == [Drop(2, 0), Drop(3, 0)]
    assert of(p.ReportFailed, effects) == [p.ReportFailed(0, "non-finite")]
    effects = core.backward_done(p.TaskKey(1, 2), "back")
    assert of(p.SendGradient, effects)
    assert of(p.ReportSealed, effects) == []
    for microbatch in (0, 1):
        assert of(p.RunForward, core.activation(microbatch, ROUTE, 1, "first", "in"))


def test_an_id_evicted_while_it_is_done_again_counts_as_never_done():
    core = pipeline(capacity=1)
    forward(core)
    backward(core)
    core.settled(0, (3,))
    forward(core, attempt=1)
    core.gradient(0, 4, "grad")
    core.evict((2,))
    core.backward_done(p.TaskKey(0, 2), "back")
    assert isinstance(core.activation(0, ROUTE, 2, "first", "in")[0], p.RunForward)


def test_a_failed_forward_is_reported_and_forgotten():
    core = pipeline()
    core.activation(0, ROUTE, 0, "first", "in")
    effects = core.work_failed(p.TaskKey(0, 2), "out of memory")
    assert effects == [p.ForgetGraph(p.TaskKey(0, 2)), p.ReportFailed(0, "out of memory"), p.Release("in")]
    assert core.idle


def test_what_cannot_be_read_is_reported_with_its_sender_where_it_is_missed():
    core = pipeline()
    named = [p.ReportFailed(0, "noise", "first")]
    assert core.unread(0, 2, "first", "noise", back=False) == named
    forward(core)
    assert core.unread(0, 2, "first", "noise", back=False) == [], "we have it already"
    assert core.unread(0, 4, "last", "noise", back=True) == [p.ReportFailed(0, "noise", "last")]
    core.gradient(0, 4, "grad")
    assert core.unread(0, 4, "last", "noise", back=True) == []
    assert core.unread(1, 4, "last", "noise", back=True) == [], "it was never sent on"


def test_gradients_that_nobody_waits_for_are_released():
    core = pipeline()
    assert core.gradient(0, 4, "x") == [p.Release("x")]
    forward(core)
    assert core.gradient(0, 3, "x") == [p.Release("x")]
    core.gradient(0, 4, "grad")
    assert core.gradient(0, 4, "again") == [p.Release("again")]


def test_once_the_step_is_decided_nothing_is_begun():
    core = pipeline()
    core.schedule.close()
    assert core.activation(0, ROUTE, 0, "first", "in") == []


@pytest.mark.parametrize("capacity", [1, 3])
def test_every_id_is_reported_once_per_block(capacity):
    core = pipeline("last", capacity=capacity)
    reported, slots = [], []
    pending = []
    for microbatch in range(8):
        pending += core.activation(microbatch, (Hop("last", 4, 6),), 0, "me", f"in {microbatch}")
    while pending:
        effect = pending.pop(0)
        match effect:
            case p.RunForward(key):
                pending += core.forward_done(key, None, 1.0)
            case p.RunBackward(key):
                pending += core.backward_done(key, f"back {key.id}")
            case p.ReportSealed(slot, ids, _):
                reported += ids[4]
                assert ids[4] == ids[5]
                slots.append(slot)
                pending += core.settled(slot, ())
    assert sorted(reported) == list(range(8))
    assert slots == sorted(slots)


def test_a_congested_link_gets_no_forwards_and_everything_else_goes_on():
    core = pipeline()
    assert core.congested("last", 0) == []
    assert core.activation(0, ROUTE, 0, "first", "in 0") == []
    (other,) = core.activation(1, (Hop("me", 2, 4), Hop("other", 4, 6)), 0, "first", "in 1")
    assert other.key.id == 1
    (run,) = core.congested("last", None)
    assert run == p.RunForward(p.TaskKey(0, 2), 4, "in 0", train=True, hops_after=1)


def test_backwards_go_on_while_a_link_is_congested():
    core = pipeline()
    forward(core, 0)
    core.congested("last", 0)
    (run,) = core.gradient(0, 4, "grad")
    assert isinstance(run, p.RunBackward)
    effects = core.backward_done(run.key, "back")
    assert of(p.SendGradient, effects)


def test_only_what_goes_as_far_is_held_back():
    """A forward whose next hop is nearer to the loss may be what the congested link waits for."""
    core = pipeline(roster={**ROSTER, "me": (2, 5), "last": (4, 6)})
    core.congested("last", 2)
    assert core.activation(0, ROUTE, 0, "first", "in 0") == []
    (near,) = core.activation(1, (Hop("me", 2, 5), Hop("last", 5, 6)), 0, "first", "in 1")
    assert near.key.id == 1
    (run,) = core.congested("last", 3)
    assert run.key.id == 0


def test_a_link_that_is_gone_as_well_as_congested_holds_nothing_back():
    core = pipeline("first")
    core.congested("me", 0)
    route = (Hop("first", 0, 2), Hop("me", 2, 4), Hop("last", 4, 6))
    assert core.assign(0, route, 0) == []
    (run,) = core.unreachable("me")
    (send,) = of(p.SendActivation, core.forward_done(run.key, "out", None))
    assert send.route[0].peer == "other"


def test_a_nudge_says_what_the_activation_would_to_a_task_that_is_known():
    core = pipeline()
    assert core.nudge(0, ROUTE, 1, "first") == []
    forward(core, 0)
    assert core.nudge(0, ROUTE, 0, "first") == []
    assert core.nudge(0, ROUTE, 1, "first") == [p.SendActivation(0, (ROUTE[1],), 1, "out 0")]
    effects = backward(core, 0)
    assert of(p.SendGradient, effects)
    assert of(p.SendGradient, core.nudge(0, ROUTE, 1, "first")) == [p.SendGradient(0, "first", 2, "back 0")]


def test_a_backward_that_fails_lets_its_gradient_go():
    core = pipeline()
    forward(core)
    core.gradient(0, 4, "grad")
    assert p.Release("grad") in core.work_failed(p.TaskKey(0, 2), "non-finite")


def test_advice_moves_what_is_not_begun():
    """The coordinator has found somebody who does it sooner; a new attempt would be an order."""
    core = pipeline("first")
    away, on = (Hop("first", 0, 2), Hop("me", 2, 4), Hop("last", 4, 6)), Hop("other", 2, 4)
    for microbatch in range(4):
        core.assign(microbatch, away, 0)
    assert core.assign(0, (away[0], on, away[2]), 0) == []  # it runs
    assert core.assign(3, (away[0], on, away[2]), 0) == []
    routes = {}
    for microbatch in range(4):
        for effect in core.forward_done(p.TaskKey(microbatch, 0), f"out {microbatch}", None):
            if isinstance(effect, p.SendActivation):
                routes[effect.id] = effect.route[0].peer
    assert routes == {0: "me", 1: "me", 2: "me", 3: "other"}


def test_what_somebody_else_is_to_begin_is_begun_there_alone():
    core = pipeline("first", roster={**ROSTER, "new": (0, 2)})
    here = (Hop("first", 0, 2), Hop("me", 2, 4), Hop("last", 4, 6))
    there = (Hop("new", 0, 2), *here[1:])
    begun = [effect.key.id for microbatch in range(4) for effect in core.assign(microbatch, here, 0)]
    assert begun == [0, 1]
    for microbatch in range(4):
        assert core.assign(microbatch, there, 0) == []
    for microbatch in begun:
        effects = core.forward_done(p.TaskKey(microbatch, 0), f"out {microbatch}", None)
        assert [type(effect) for effect in effects] == [p.SendActivation]


def test_everything_is_reported_when_the_coordinator_waits():
    core = pipeline()
    forward(core, 0)
    forward(core, 1)
    assert of(p.ReportSealed, backward(core, 0)) == []
    (report,) = core.urge()
    assert report.ids == {2: (0,), 3: (0,)}
    assert core.urge() == []


def test_what_a_peer_counted_while_its_link_was_down_is_sent_again_when_it_is_gone():
    core = pipeline("first")
    route = (Hop("first", 0, 2), Hop("me", 2, 4), Hop("last", 4, 6))
    core.assign(0, route, 0)
    core.forward_done(p.TaskKey(0, 0), "out", None)
    (elsewhere,) = core.unreachable("me")
    assert elsewhere.route[0].peer == "other"
    (again,) = core.gone("me")
    assert (again.id, again.route[0].peer) == (0, "other")
    assert core.gone("me") == []
