"""What a holder does for spot checks: lending, answering once more, comparing, and computing into a slot
that counts nowhere.
"""

from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.gradient_slots import CHECKS
from hetpeer.stages.pipeline.routes import Hop
from tests.stages.test_pipeline import ROUTE, backward, forward, of, pipeline

AGAIN = p.TaskKey(0, 2, check=7)
OTHER = (Hop("other", 2, 4), Hop("last", 4, 6))


def checking(core, microbatch=0):
    """`me` computes once more what `other` has done."""
    return core.activation(microbatch, ROUTE, 0, "first", f"lent {microbatch}", check=7)


def test_a_checker_computes_into_a_slot_of_the_check_and_says_so():
    core = pipeline()
    (run,) = checking(core)
    assert run == p.RunForward(AGAIN, 4, "lent 0", train=True, hops_after=1)
    (ask,) = core.forward_done(AGAIN, "out", None)
    assert ask == p.SendActivation(0, (ROUTE[1],), 0, "out", 7, asks=True)
    (run,) = core.gradient(0, 4, "grad")
    assert run == p.RunBackward(AGAIN, 4, "grad", CHECKS + 7, (2, 3))
    effects = core.backward_done(AGAIN, "back")
    assert set(of(p.Release, effects)) == {p.Release(x) for x in ("lent 0", "grad", "out")}
    assert of(p.ReportChecked, effects) == [p.ReportChecked(AGAIN)]
    assert not of(p.ReportSealed, effects)
    assert of(p.SendGradient, effects) == [p.SendGradient(0, "first", 2, "back", 7)], (
        "who has lent it compares"
    )
    assert checking(core) == [p.Release("lent 0")], "an id enters the slot once"


def test_its_own_slots_are_sealed_as_if_there_were_no_check():
    core = pipeline()
    checking(core, 1)
    forward(core, 0)
    assert of(p.ReportSealed, backward(core, 0)), "the other one is still under way"
    core.forward_done(p.TaskKey(1, 2, 7), "out", None)
    core.gradient(1, 4, "grad")
    assert not of(p.ReportSealed, core.backward_done(p.TaskKey(1, 2, 7), "back"))


def test_an_id_may_be_ours_and_checked_at_once():
    """Its holder has died, and it was handed out again: to whoever checks it."""
    core = pipeline()
    checking(core)
    core.forward_done(AGAIN, "out", None)
    forward(core, 0)
    effects = core.gradient(0, 4, "grad")
    assert {run.key for run in of(p.RunBackward, effects)} == {AGAIN}
    assert [send.handle for send in of(p.SendActivation, effects)] == ["out 0"], "it asks for one of its own"
    core.backward_done(AGAIN, "back")
    (run,) = of(p.RunBackward, core.gradient(0, 4, "the same"))
    assert (run.key, run.slot) == (p.TaskKey(0, 2), 0)


def test_checks_do_not_fill_the_window():
    core = pipeline()
    for microbatch in range(4):
        (run,) = checking(core, microbatch)
        core.forward_done(run.key, f"out {microbatch}", None)
    assert of(p.RunForward, core.activation(5, ROUTE, 0, "first", "in"))


def test_who_was_sent_it_answers_with_what_it_keeps_and_forgets_the_copy():
    core = pipeline("last")
    route = (Hop("last", 4, 6),)
    core.activation(0, route, 0, "other", "in")
    compared = [p.CompareBundle(7, 0, 4, False, "me", "copy"), p.Release("copy")]
    assert core.recomputations.answer(0, 4, "me", "copy", 7) == compared, "there is no gradient yet"
    core.forward_done(p.TaskKey(0, 4), None, 1.5)
    core.backward_done(p.TaskKey(0, 4), "back")
    assert core.recomputations.answer(0, 4, "me", "copy", 7) == [
        *compared,
        p.SendGradient(0, "me", 4, "back"),
    ]
    assert not of(p.SendGradient, core.recomputations.answer(3, 4, "me", "copy", 7)), "never heard of"


def test_who_has_lent_it_compares_the_gradient_and_forgets_it():
    core = pipeline("first", roster={"first": (0, 2), "me": (2, 4), "other": (2, 4), "last": (4, 6)})
    core.assign(0, (Hop("first", 0, 2), *ROUTE), 0)
    core.forward_done(p.TaskKey(0, 0), "out", None)
    compared = [p.CompareBundle(7, 0, 2, True, "other", "again"), p.Release("again")]
    assert core.recomputations.returned(0, 2, "other", "again", 7) == compared
    assert of(p.RunBackward, core.gradient(0, 2, "grad")), "it is not what the task waits for"


def test_where_somebody_else_counts_it_by_now_the_checker_asks_there():
    core = pipeline(roster={"me": (2, 4), "last": (4, 6), "later": (4, 6)})
    checking(core)
    elsewhere = (ROUTE[0], Hop("later", 4, 6))
    assert core.activation(0, elsewhere, 0, "first", "twice", check=7) == [p.Release("twice")]
    (ask,) = core.forward_done(AGAIN, "out", None)
    assert ask.route == elsewhere[1:]
    effects = core.activation(0, ROUTE, 0, "first", "twice", check=7)
    assert effects == [p.Release("twice"), p.SendActivation(0, ROUTE[1:], 0, "out", 7, asks=True)]
    assert core.activation(0, ROUTE, 0, "first", "twice", check=7) == [p.Release("twice")], "that is known"


def test_who_has_sent_it_lends_what_it_keeps():
    core = pipeline("first", roster={"first": (0, 2), "me": (2, 4), "other": (2, 4), "last": (4, 6)})
    core.assign(0, (Hop("first", 0, 2), *ROUTE), 0)
    assert core.check(0, OTHER, 7) == [], "it is not there yet"
    core.forward_done(p.TaskKey(0, 0), "out", None)
    assert core.check(0, OTHER, 7) == [p.SendActivation(0, OTHER, 0, "out", check=7)]
    assert core.gone("other") == [], "what was lent is nobody's task"
    (run,) = core.check(1, (Hop("first", 0, 2), *ROUTE), 7)
    assert (run.key, run.source) == (p.TaskKey(1, 0, 7), None), "what begins with the data begins here"


def test_a_check_that_breaks_is_never_said_to_be_done():
    core = pipeline()
    checking(core, 0)
    effects = core.work_failed(AGAIN, "non-finite")
    assert effects == [p.ForgetGraph(AGAIN), p.Release("lent 0")]
    assert not of(p.ReportFailed, effects)
    assert checking(core, 1) == [p.Release("lent 1")]
    core = pipeline()
    checking(core, 0)
    core.gone("last")
    effects = core.forward_done(AGAIN, "out", None)
    assert effects == [p.ForgetGraph(AGAIN), p.Release("lent 0"), p.Release("out")], "nobody has the gradient"


def test_an_evaluation_is_not_checked():
    assert pipeline().activation(8, ROUTE, 0, "first", "in", check=7) == [p.Release("in")]
