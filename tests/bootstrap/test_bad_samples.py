"""A microbatch that the coordinator has computed itself, with a coordinator driven by hand (docs/trust.md,
"A sample that cannot be computed").
"""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.step_failures import MAX_FAILURES
from hetpeer.bootstrap.state.effects import BadSample, CoordinatorState, Send
from hetpeer.dht.base.errors import ProtocolError
from tests.bootstrap.court import Court, failed, kinds

BAD = BadSample("sample 7 of shard train-0", "'loss' is not finite")


def trial_of(court, peer="a", microbatch=0):
    """Let `peer`, which is alone, fail until the coordinator computes the microbatch itself."""
    court.finds_nothing = False
    for _ in range(MAX_FAILURES):
        failed(court, peer, microbatch)
    (trial,) = court.trials
    court.trials.clear()
    return trial


def tried(court, trial, found=BAD):
    return court.do(court.core.tried(trial, found, court.now))


def test_nobody_is_fenced_before_the_coordinator_knows_better():
    court = Court().begin("a")
    trial_of(court)
    assert not failed(court, "a")
    assert "a" in court.core.working()


def test_where_nothing_is_found_it_is_the_volunteers_failure():
    court = Court().begin("a")
    assert "fenced" in court.told("a", tried(court, trial_of(court), None))


def test_what_is_found_halts_the_run_and_says_which_sample():
    court = Court().begin("a")
    tried(court, trial_of(court))
    assert court.core.state is CoordinatorState.FINISHED
    assert BAD.where in court.records[-1]["why"]
    assert BAD.where in court.sent["a", "finished"].why


def test_a_skipped_id_is_in_no_slot_and_the_others_make_the_update():
    court = Court(skips=True).begin("a")
    tried(court, trial_of(court))
    assert [one["id"] for one in court.records if one["kind"] == "bad_sample"] == [0]
    court.sealed("a", (0, 1))
    assert court.sent["a", "settled"].refused == (0, 1)
    court.sealed("a", (1,), slot=1)
    assert court.sent["a", "settled"].refused == ()
    court.vote("a")
    commit = court.records[-1]
    assert (commit["kind"], commit["skipped"], commit["loss"]) == ("commit", [0], 1.0)


def test_slots_that_have_it_already_are_given_up_and_their_other_ids_done_again():
    """Its gradient fails at another block than those that have counted it."""
    court = Court(skips=True).begin("a")
    court.sealed("a", (0, 1), blocks=(1, 2))
    effects = tried(court, trial_of(court))
    assert court.sent["a", "evict"].blocks == (1,)
    routed = [e.message.tasks for e in effects if isinstance(e, Send) and isinstance(e.message, m.Reroute)]
    assert [task.id for tasks in routed for task in tasks] == [1]
    court.sealed("a", (1,), slot=1)
    court.vote("a")
    assert court.records[-1]["skipped"] == [0]


def test_what_somebody_has_computed_meanwhile_is_not_skipped():
    court = Court(skips=True).begin("a")
    trial = trial_of(court)
    court.sealed("a", (0, 1))
    assert tried(court, trial) == []
    assert not any(one["kind"] == "bad_sample" for one in court.records)


@pytest.mark.parametrize("found", [BAD, None])
def test_an_answer_that_nobody_waits_for_changes_nothing(found):
    court = Court(skips=True)
    before = Court(skips=True).begin("a")
    trial = trial_of(before)
    assert tried(court, trial, found) == []
    court.begin("a")
    assert tried(court, trial, found) == []
    court.sealed("a", (0, 1))
    assert court.core.state is CoordinatorState.REDUCING
    assert tried(court, trial, found) == []
    court = Court().begin("a")
    trial = trial_of(court)
    tried(court, trial)
    assert court.core.state is CoordinatorState.FINISHED
    assert tried(court, trial, found) == []


def test_the_next_term_knows_it_from_the_log_and_hands_it_out_to_nobody():
    court = Court(skips=True).begin("a")
    tried(court, trial_of(court))
    later = Court(court.records, skips=True).begin("a")
    assert [task.id for task in later.sent["a", "begin"].tasks] == [1]
    later.sealed("a", (1,))
    assert "commit" in kinds(later.vote("a"))
    assert later.records[-1]["skipped"] == [0]


def test_a_halted_run_that_is_begun_again_halts_again_without_another_look():
    court = Court().begin("a")
    tried(court, trial_of(court))
    later = Court(court.records).begin("a")
    for _ in range(MAX_FAILURES):
        failed(later, "a", 0)
    assert later.core.state is CoordinatorState.FINISHED
    assert BAD.where in later.records[-1]["why"]


def test_a_report_of_an_unknown_id_is_an_offence_all_the_same():
    court = Court(skips=True).begin("a")
    tried(court, trial_of(court))
    with pytest.raises(ProtocolError, match="not of step"):
        court.sealed("a", (0, 1, 2))
