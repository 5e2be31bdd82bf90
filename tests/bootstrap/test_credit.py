"""Who has contributed what, by the log; and reports that would inflate it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.log.credit import Credit, work_in, written
from hetpeer.bootstrap.log.history import History
from tests.bootstrap.court import BLOCKS, Court
from tests.bootstrap.engine import rewrite_log


def commit(step, **work):
    """`anna=8` counted 8, in a log whose peers come in the order of their names."""
    names = ["anna", "bert", "carl"]
    newcomers = names if step == 0 else []
    counted = [field for name, amount in work.items() for field in (names.index(name), amount)]
    return {"kind": "commit", "step": step, "batch": step, "newcomers": newcomers, "counted": counted}


def credit_of(*records, **options):
    credit = Credit(**options)
    for record in records:
        credit.add(record)
    return dict(credit.of)


def test_work_is_samples_times_blocks():
    covers = [[("anna", (0, 2)), ("bert", (1,))], [("anna", (0, 1, 2))]]
    assert work_in(covers, {0: 8, 1: 8, 2: 3}) == {"anna": 11 + 19, "bert": 8}


def test_a_record_names_a_peer_once_and_then_by_its_number():
    first = written({"bert": 4, "anna": 2}, {})
    assert first == {"newcomers": ["anna", "bert"], "counted": [0, 2, 1, 4]}
    numbers = History.of([{"kind": "commit", "step": 0, **first}]).contributors
    assert written({"bert": 6}, numbers) == {"counted": [1, 6]}
    assert written({"bert": 6, "aaron": 1}, numbers) == {"newcomers": ["aaron"], "counted": [1, 6, 2, 1]}


def test_names_are_of_the_log_and_not_of_one_cluster():
    other = {"kind": "commit", "cluster": 1, "step": 0, **written({"bert": 4}, {})}
    assert History.of([other]).contributors == {"bert": 0}


def test_a_rollback_takes_back_what_it_undoes():
    history = [commit(0, anna=8), commit(1, anna=4, bert=4), commit(2, bert=8)]
    assert credit_of(*history) == {"anna": 12, "bert": 12}
    back = [*history, {"kind": "rollback", "to_version": 1}]
    assert credit_of(*back) == {"anna": 8}
    assert credit_of(*back, commit(1, carl=8), sample=64) == {"anna": 512, "carl": 512}


WORK = st.dictionaries(st.sampled_from(["anna", "bert", "carl", "dora"]), st.integers(1, 99), min_size=1)
BACK = st.integers(0, 8)


@given(st.lists(WORK | BACK, max_size=30))
def test_whatever_happens_it_is_that_of_the_commits_that_are_left(events):
    """An independent count: of the work that each step's last commit was made with."""
    credit, history, left = Credit(), History(), {}
    for event in events:
        if isinstance(event, int):
            version = min(event, history.version)
            record = {"kind": "rollback", "view": history.view + 1, "to_version": version}
            left = {step: work for step, work in left.items() if step < version}
        else:
            record = {"kind": "commit", "step": history.version, **written(event, history.contributors)}
            left[history.version] = event
        history.add(record)
        credit.add(record)
        assert credit.of == sum(map(Counter, left.values()), Counter())


def test_a_cluster_takes_with_it_what_no_other_has():
    own = [
        commit(0, anna=8) | {"cluster": 0},
        commit(0, bert=8) | {"cluster": 1, "batch": 1, "newcomers": []},
    ]
    founded = [{"kind": "founded", "cluster": cluster, "version": 0} for cluster in (0, 1)]
    gone = {"kind": "dissolved", "cluster": 1}
    assert credit_of(*founded, *own, grouped=4) == {"anna": 8, "bert": 8}
    assert credit_of(*founded, *own, gone, grouped=4) == {"anna": 8}
    average = {"kind": "average", "group": 1, "clusters": [(0, 1), (1, 1)], "installed": [(0, 1), (1, 1)]}
    assert credit_of(*founded, *own, average, gone, grouped=4) == {"anna": 8, "bert": 8}


def test_when_no_cluster_lives_the_last_checkpoint_counts():
    records = [
        {"kind": "founded", "cluster": 0, "version": 0},
        commit(0, anna=8) | {"cluster": 0},
        {"kind": "checkpoint", "cluster": 0, "version": 1},
        commit(1, bert=8) | {"cluster": 0},
        {"kind": "dissolved", "cluster": 0},
    ]
    assert credit_of(*records, grouped=4) == {"anna": 8}
    assert credit_of(*records, {"kind": "founded", "cluster": 1, "version": 1}, grouped=4) == {"anna": 8}


def test_commits_of_before_there_was_credit_give_nothing():
    assert credit_of({"kind": "commit", "step": 0}, commit(1), {"kind": "rollback", "to_version": 1}) == {}


# ── at the coordinator ──────────────────────────────────────────────────────────────────────────────────────


def test_the_coordinator_writes_whose_slots_it_has_added():
    court = Court(layouts=(((0, BLOCKS),), ((0, BLOCKS),)), sizes=(3, 2))
    court.begin("anna", "bert")
    court.sealed("anna", (0,))
    court.sealed("bert", (1,))
    for peer in ("anna", "bert"):
        court.vote(peer)
    (record,) = [one for one in court.records if one["kind"] == "commit"]
    assert (record["newcomers"], record["counted"]) == (["anna", "bert"], [0, 3 * BLOCKS, 1, 2 * BLOCKS])


def test_what_a_volunteer_says_of_blocks_that_it_does_not_hold_does_not_count():
    """It would be credited for them, and be asked for a sum that it does not have."""
    court = Court(layouts=(((0, 1), (1, 2)),))
    court.begin("anna", "bert")
    places = court.core.members.roster()
    anna, bert = (next(peer for peer, place in places.items() if place[0] == block) for block in (0, 1))
    court.sealed(anna, (0, 1), blocks=(0, 2))
    court.sealed(bert, (0, 1), blocks=(0, 2))
    assert (anna, "plan") not in court.sent
    court.sealed(anna, (0, 1), slot=1, blocks=(0, 1))
    court.sealed(bert, (0, 1), slot=1, blocks=(1, 2))
    covers = {cover.block: cover.slots for cover in court.sent[anna, "plan"].covers}
    assert covers[0] == ((anna, (0, 1)),)


# ── at the audit ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_audit_counts_the_surviving_commits(trained, volunteers):
    verdict = audit(trained.path)
    each = 4 * 4 * 16 * len(trained.manifest.blocks)  # four steps of four samples of 16 tokens
    assert (verdict.ok, verdict.unit) == (True, "tok")
    assert verdict.credit == dict.fromkeys((v.peer_id for v in volunteers), each)


@pytest.mark.parametrize(("step", "found"), [(1, True), (2, False)])
def test_credit_that_nobody_signed_for_is_found(trained, step, found):
    """In step 1; not in the first step 2, which was taken back, and gives nothing."""

    def inflate(records):
        record = next(one for one in records if one["kind"] == "commit" and one["step"] == step)
        record["counted"][-1] += 1

    rewrite_log(trained, inflate)
    verdict = audit(trained.path)
    assert (set(verdict.broken) == {"C1"}) is found
    assert any("is credited" in problem for problem in verdict.problems) is found
