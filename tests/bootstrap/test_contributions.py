"""What the coordinator writes down of work that is in no sum, and what the audit makes of it."""

import typer
from typer.testing import CliRunner

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.log.contributions import ContributionLog, Tally
from hetpeer.bootstrap.log.evidence import AppliedEvent
from hetpeer.bootstrap.log.history import decisions_of
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.peer.cli.author import audit_command as command
from hetpeer.stages.pipeline.delays import Delays
from tests.bootstrap.court import BLOCKS, Court
from tests.bootstrap.engine import rewrite_log

PAIR = (((0, BLOCKS),), ((0, BLOCKS),))


def court(**changes):
    """`a` and `b` hold all blocks."""
    return Court(layouts=PAIR, checkpoint_every=100, **changes).begin("a", "b")


def committed(one):
    for peer in ("a", "b"):
        if peer in one.core.working():
            one.vote(peer)
    return [record for record in one.records if record["kind"] == "commit"][-1]


def named(one, state, *more):
    """(why, peer, step, id) of what the list has in that state."""
    surviving = [d for record in one.records for d in decisions_of(record)]
    each = ContributionLog(one.records, surviving, {}, 2, BLOCKS)
    return [(c.why, *c.peers, c.step, c.id) for c in each if c.state == state]


def test_a_duplicate_is_late_and_its_company_is_open_again():
    one = court(sizes=(1, 1, 1))
    one.sealed("a", (0, 1))
    one.sealed("b", (1, 2))
    one.sealed("b", (2,), slot=1)
    record = committed(one)
    assert (record["late"], record["lost"]) == ([("b", [1])], [("b", [2])])
    assert named(one, "late") == [("duplicate", "b", 0, 1)]
    assert named(one, "lost") == [("redone", "b", 0, 2)]


def test_who_is_displaced_by_a_larger_sum_was_late_and_what_it_alone_had_is_lost():
    one = court(sizes=(1, 1, 1, 1, 1))
    one.sealed("a", (0, 1))
    one.sealed("b", (1, 2, 3, 4))
    one.sealed("a", (0,), slot=1)
    record = committed(one)
    assert (record["late"], record["lost"]) == ([("a", [1])], [("a", [0])])


def test_what_a_dead_volunteer_had_or_was_to_do_is_lost_and_used_once():
    one = court(sizes=(1, 1, 1, 1))
    ids = {task.id for task in one.sent["b", "begin"].tasks}
    assert 0 < len(ids) < 4
    one.sealed("b", sorted(ids)[:1])
    one.core.broken("b", one.now)
    for _ in range(20):
        one.tell("a", m.Heartbeat())
        one.tick(1.0)
    one.sealed("a", range(4))
    record = committed(one)
    assert record["lost"] == [("b", sorted(ids))]


def test_what_is_reported_after_the_commit_is_told_with_the_next_one():
    one = court()
    one.commit("a", "b")
    assert one.core.step == 1
    one.sealed("b", (1,), step=0)
    one.sealed("stranger", (1,), step=0)
    one.sealed("b", (7,), step=0)
    one.count("a")
    record = committed(one)
    assert record["afterwards"] == [(0, [("b", [1])])]
    assert named(one, "late") == [("afterwards", "b", 0, 1)]
    assert "afterwards" not in one.records[[r["kind"] for r in one.records].index("commit")]


def test_what_counted_in_a_step_that_comes_to_nothing_is_lost():
    """Steps overlap, and the last holder of a block leaves."""
    one = Court(layouts=(((0, 1), (1, BLOCKS)),), staleness=1, checkpoint_every=100).begin("a", "b")
    places = one.core.working()
    first = next(peer for peer, place in places.items() if place == (0, 1))
    other = next(peer for peer in places if peer != first)
    one.sealed(first, (0, 1), blocks=(0, 1))
    one.sealed(first, (1,), blocks=(0, 1), step=1)
    one.hello(other, incarnation=2)
    (back,) = [record for record in one.records if record["kind"] == "rollback"]
    assert [(step["step"], step["behind"], step["lost"]) for step in back["given_up"]] == [
        (0, 0, [(first, [0, 1])]),
        (1, 1, [(first, [1])]),
    ]
    assert named(one, "lost") == [
        ("given up", first, 0, 0),
        ("given up", first, 0, 1),
        ("given up", first, 1, 1),
    ]


def commit(step, **changes):
    return {"kind": "commit", "view": 0, "step": step, "batch": step, "plan": 1, "gradients": {}} | changes


def said(step, base, peer="a", ids=(0, 1)):
    return AppliedEvent.model_construct(peer=peer, step=step, base=base, cover=[(peer, list(ids))])


def listed(records, applied, delays=None):
    surviving = [d for record in records for d in decisions_of(record)]
    return ContributionLog(records, surviving, applied, 2, 1, delays)


def test_used_is_signed_where_holders_name_the_id_once_and_the_base():
    records = [commit(step, behind=min(step, 1), late=[], lost=[]) for step in range(4)]
    applied = {
        (0, 0, 0, 1, 0): [said(0, None)],
        (0, 0, 1, 1, 0): [said(1, 0)],
        (0, 0, 2, 1, 0): [said(2, 2)],
        (0, 0, 3, 1, 0): [said(3, 2), said(3, 2, ids=(0, 1, 1))],
    }
    found = [(one.step, one.id) for one in listed(records, applied) if one.signed]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0)]
    assert listed(records, applied).tally() == Tally(used={0: 2, 1: 6}, signed=5)


def test_with_a_head_start_the_first_ids_of_a_step_are_stale_and_the_others_fresh():
    records = [commit(0, late=[], lost=[]), commit(1, behind=1, late=[("a", [0])], lost=[("b", [1])])]
    applied = {(0, 0, step, 1, 0): [said(step, 0)] for step in range(2)}
    told = listed(records, applied, Delays(head_start=1))
    found = [(one.state, one.id, one.base, one.staleness, one.signed) for one in told]
    assert found[:2] == [("used", 0, 0, 0, True), ("used", 1, 0, 0, True)]
    assert found[2:4] == [("used", 0, 0, 1, True), ("used", 1, 1, 0, True)]
    assert found[4:] == [("late", 0, 0, 1, False), ("lost", 1, 1, 0, False)]


def test_with_staleness_by_stage_each_block_has_to_be_signed_with_its_own_base():
    records = [commit(step, behind=min(step, 1), late=[], lost=[]) for step in range(3)]
    applied = {
        (0, 0, 0, 1, 0): [said(0, 0)],
        (0, 0, 0, 1, 1): [said(0, 0)],
        (0, 0, 1, 1, 0): [said(1, 0)],
        (0, 0, 1, 1, 1): [said(1, 1)],
        (0, 0, 2, 1, 0): [said(2, 1)],
        (0, 0, 2, 1, 1): [said(2, 1)],
    }
    surviving = [d for record in records for d in decisions_of(record)]
    told = ContributionLog(records, surviving, applied, 2, 2, Delays(stages=((0, 1), (1, 0))))
    assert [(one.step, one.id, one.base) for one in told if one.signed] == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 0, 0),
        (1, 1, 0),
    ]


def test_a_batch_is_told_with_the_averaging_by_which_it_came_to_others():
    groups = [
        {"kind": "average", "group": 4, "clusters": [(0, 1), (1, 1)], "installed": [], "sums": {}},
        {"kind": "average", "group": 5, "clusters": [(0, 3), (2, 9)], "installed": [], "sums": {}},
    ]
    records = [commit(0), groups[0], commit(2, batch=7), groups[1], commit(4)]
    found = [one.group for one in listed(records, {}) if one.id == 0]
    assert found == [4, 5, None]


def test_a_log_of_before_does_not_say(trained: RunDirectory) -> None:
    verdict = audit(trained.path)
    assert verdict.contributed == Tally(used={0: 16}, signed=16, lost=4, silent=4)
    assert verdict.contributions is None


def test_the_command_tells_of_each(trained: RunDirectory) -> None:
    names = ["QmFirst", "QmOther"]

    def unused(records):
        for record in records:
            if record["kind"] == "commit":
                record |= {"late": [], "lost": []}
            if record["kind"] == "commit" and record["step"] == 3:
                record |= {"late": [[names[0], [0, 2, 3]]], "lost": [[names[1], [1]]]}
                record |= {"afterwards": [[2, [[names[1], [3]]]]]}

    rewrite_log(trained, unused)
    app = typer.Typer()
    app.command()(command.audit)
    text = CliRunner().invoke(app, [str(trained.path), "--contributions"]).stdout
    assert "contributions 16 used, 4 late, 5 lost and done again" in text
    lines = [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("contribution ")]
    assert lines == [
        "step 0, batch 0, base 0, staleness 0: used 0-3",
        "step 1, batch 1, base 1, staleness 0: used 0-3",
        "step 2, batch 2, base 2, staleness 0: lost 0-3 (taken back)",
        "step 2 view 1, batch 2, base 2, staleness 0: used 0-3",
        "step 3 view 1, batch 3, base 3, staleness 0: used 0-3",
        "step 3 view 1, batch 3, base 3, staleness 0: late 0, 2-3 (duplicate) of QmFirst",
        "step 3 view 1, batch 3, base 3, staleness 0: lost 1 (redone) of QmOther",
        "step 2 view 1, batch 2, base 2, staleness 0: late 3 (afterwards) of QmOther",
    ]
