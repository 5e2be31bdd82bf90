"""The audit passes an honest history and names what is wrong with every other."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.log.record_log import Log, read_log
from hetpeer.bootstrap.log.volunteer_log import sign_event
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import AveragingSettings
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.cli.author.audit_command import _verdict_json, _verdict_text
from tests.bootstrap.engine import Engine, rewrite_log
from tests.swarm.swarm import resign as sign_again

pytestmark = pytest.mark.xdist_group("trained run")

Change = Callable[[dict[str, Any]], Any]
Records = list[dict[str, Any]]


def log_of(run: RunDirectory, volunteer: Identity) -> Path:
    return run.volunteers / f"{volunteer.peer_id}.jsonl"


def resign(run: RunDirectory, volunteer: Identity, change: Change, *, step: int = 1, block: int = 0) -> None:
    """Change one event and sign it again, as a volunteer whose engine is wrong would have written it."""
    path = log_of(run, volunteer)
    lines = []
    for line in path.read_text().splitlines():
        record = json.loads(line)["record"]
        if (record["step"], record["block"]) == (step, block):
            change(record)
        lines.append(sign_event(record, volunteer) + "\n")
    path.write_text("".join(lines))


def test_honest_history_passes(trained: RunDirectory) -> None:
    verdict = audit(trained.path)
    assert verdict.problems == []
    assert verdict.ok
    assert (verdict.steps, verdict.steps_planned, verdict.rollbacks) == (4, 4, 1)
    assert (verdict.microbatches_expected, verdict.counted, verdict.lost, verdict.duplicated) == (
        16,
        16,
        0,
        0,
    )
    assert (verdict.volunteers, verdict.events) == (2, 4 * 2 * len(trained.manifest.blocks))


def test_moves_are_shown_with_what_they_promised_and_what_came(trained: RunDirectory) -> None:
    promise = {"before_s": 31.8, "after_s": 27.2, "moving_s": 13.0, "costs": 1.0, "blocks": 20}

    def move(records: Records) -> None:
        moved = {"kind": "moved", "after_s": 32.9, "moving_s": 45.0, "why": ""}
        records += [{"kind": "arranged", "layouts": [], "promise": promise}, moved]

    rewrite_log(trained, move)
    verdict = audit(trained.path)
    assert verdict.ok
    (told,) = [line for line in _verdict_text(verdict, None, True).splitlines() if line.startswith("move")]
    assert told == (
        "move          step 4: 20 blocks moved; 27.2 s a step instead of 31.8 s promised, for 13 s of "
        "moving; it took 45 s; a step takes 32.9 s now"
    )
    (shown,) = json.loads(_verdict_json(verdict, None, True))["moves"]
    assert (shown["step"], shown["promise"], shown["result"]["after_s"]) == (4, promise, 32.9)


def test_edited_line_is_found(trained: RunDirectory, volunteers: list[Identity]) -> None:
    path = log_of(trained, volunteers[0])
    lines = path.read_text().splitlines(keepends=True)
    lines[3] = (
        lines[3].replace('"step":0', '"step":1')
        if '"step":0' in lines[3]
        else lines[3].replace('"step":1', '"step":0')
    )
    path.write_text("".join(lines))
    verdict = audit(trained.path)
    assert not verdict.ok
    assert f"{path.name} line 4" in verdict.problems[0]


@pytest.mark.parametrize(("fresh_steps", "passes"), [(0, True), (2, False)])
def test_parameters_older_than_they_may_be_are_named(
    fresh: RunDirectory, volunteers: list[Identity], fresh_steps: int, passes: bool
) -> None:
    """Step 1 is said to be of version 0, by the coordinator and by all who hold a block.

    Its batch is not the coordinator's to choose.
    """
    training = fresh.manifest.training.model_copy(update={"staleness": 1, "fresh_steps": fresh_steps})
    run = sign_again(fresh, training=training)
    Engine(run, volunteers).train()

    def older(records: list[dict[str, Any]]) -> None:
        for record in records:
            if (record["kind"], record.get("step")) == ("commit", 1):
                record |= {"behind": 1, "batch": 99}

    rewrite_log(run, older)
    for volunteer in volunteers:
        for block in range(len(run.manifest.blocks)):
            resign(run, volunteer, lambda record: record.update(base=0), block=block)
    verdict = audit(run.path)
    assert verdict.ok == passes, verdict.problems
    assert passes or "step 1 is of parameters 1 updates old" in verdict.problems


@pytest.mark.parametrize(("last", "named"), [(1, False), (0, True)])
def test_a_stage_that_is_said_to_be_staler_than_it_may_be_is_named(
    fresh: RunDirectory, volunteers: list[Identity], last: int, named: bool
) -> None:
    """Step 1 was opened one behind; all say that they computed all blocks with version 0."""
    stages = len(fresh.manifest.layouts[0])
    training = fresh.manifest.training.model_copy(
        update={"staleness": min(2, last + stages - 1), "last_staleness": last}
    )
    run = sign_again(fresh, training=training)
    Engine(run, volunteers).train()

    def older(records: list[dict[str, Any]]) -> None:
        for record in records:
            if (record["kind"], record.get("step")) == ("commit", 1):
                record |= {"behind": 1}

    rewrite_log(run, older)
    for volunteer in volunteers:
        for block in range(len(run.manifest.blocks)):
            resign(run, volunteer, lambda record: record.update(base=0), block=block)
    verdict = audit(run.path)
    begin, _ = run.manifest.layouts[0][-1]
    problem = f"step 1 block {begin}: computed with another version than was decided"
    assert (problem in verdict.problems) == named, verdict.problems
    assert verdict.ok == (not named), verdict.problems


@pytest.mark.parametrize(("batch", "named"), [(1, True), (2, False)])
def test_whether_parameters_of_a_grouped_run_may_be_older_is_a_matter_of_the_batch(
    fresh: RunDirectory, volunteers: list[Identity], batch: int, named: bool
) -> None:
    """A cluster's second step may train a batch that others have left, or one behind theirs."""
    training = fresh.manifest.training.model_copy(update={"staleness": 1, "fresh_steps": 2})
    run = sign_again(fresh, training=training, averaging=AveragingSettings(window_s="all"))
    Engine(run, volunteers).train()

    def of_a_cluster(records: list[dict[str, Any]]) -> None:
        for record in records:
            if (record["kind"], record.get("step")) == ("commit", 1):
                record |= {"behind": 1, "batch": batch}

    rewrite_log(run, of_a_cluster)
    problems = audit(run.path).problems
    assert any("is of parameters 1 updates old" in problem for problem in problems) == named, problems


def drop_id(record: dict[str, Any]) -> None:
    record["cover"][1][1].remove(3)


def double_id(record: dict[str, Any]) -> None:
    record["cover"][1][1].append(0)


def test_dropped_microbatch_is_lost(trained: RunDirectory, volunteers: list[Identity]) -> None:
    for volunteer in volunteers:
        resign(trained, volunteer, drop_id)
    verdict = audit(trained.path)
    assert not verdict.ok
    assert (verdict.counted, verdict.lost, verdict.duplicated) == (15, 1, 0)
    assert "step 1: microbatches lost: 3" in verdict.problems


@pytest.mark.parametrize(("skipped", "told"), [([3], True), ([2], True), ([3], False)])
def test_an_id_that_the_commit_skips_is_expected_nowhere(
    trained: RunDirectory, volunteers: list[Identity], skipped: list[int], told: bool
) -> None:
    """Holders that leave out another id than the skipped one are found, and one without a reason."""
    blocks = range(len(trained.manifest.blocks))
    for volunteer in volunteers:
        for block in blocks:
            resign(trained, volunteer, drop_id, block=block)

    def skip(records: Records) -> None:
        for record in records:
            if (record["kind"], record.get("step")) == ("commit", 1):
                record["skipped"] = skipped
                place = sorted(v.peer_id for v in volunteers).index(volunteers[1].peer_id)
                record["counted"][2 * place + 1] -= trained.manifest.training.samples_of(3) * len(blocks)

        why = {"where": "sample 1 of shard s", "why": "not finite", "skipped": True}
        if told:
            records.insert(1, {"kind": "bad_sample", "batch": 1, "id": skipped[0], "step": 1, **why})

    rewrite_log(trained, skip)
    verdict = audit(trained.path)
    assert (verdict.microbatches_expected, verdict.skipped) == (15, 1)
    assert verdict.contributed.used == {0: 15}
    if not told:
        assert verdict.problems == ["step 1 skips microbatch 3, and the log does not say why"]
    elif skipped == [3]:
        assert verdict.problems == []
    else:
        assert "step 1: microbatches lost: 3" in verdict.problems
        assert "step 1: microbatches unknown: 2" in verdict.problems


def test_doubled_microbatch_is_duplicated(trained: RunDirectory, volunteers: list[Identity]) -> None:
    for volunteer in volunteers:
        resign(trained, volunteer, double_id, block=2)
    verdict = audit(trained.path)
    assert not verdict.ok
    assert (verdict.counted, verdict.lost, verdict.duplicated) == (15, 0, 1)
    assert "step 1: microbatches counted twice: 0" in verdict.problems


def test_one_holder_alone_is_enough_to_fail(trained: RunDirectory, volunteers: list[Identity]) -> None:
    resign(trained, volunteers[1], drop_id)
    assert audit(trained.path).lost == 1


@pytest.fixture
def third(trained: RunDirectory, volunteers: list[Identity], tmp_path: Path) -> Identity:
    """It has signed the same as the first one."""
    return joined(trained, volunteers[0], tmp_path / "third")


def joined(run: RunDirectory, like: Identity, key: Path) -> Identity:
    other = Identity.create(key)
    lines = [json.loads(line)["record"] for line in log_of(run, like).read_text().splitlines()]
    text = "".join(sign_event(record | {"peer": other.peer_id}, other) + "\n" for record in lines)
    log_of(run, other).write_text(text)
    return other


@pytest.mark.parametrize(
    "lie",
    [
        drop_id,
        double_id,
        lambda record: record.update(cover=[]),
        lambda record: record.update(base=0),
        lambda record: record.update(gradient="00" * 32),
        lambda record: record.update(state="00" * 32),
    ],
)
def test_one_against_most_is_named_and_the_run_is_judged_by_what_most_say(
    trained: RunDirectory, third: Identity, lie: Change
) -> None:
    """Whether it holds that block or not; nobody is credited falsely for it."""
    honest = audit(trained.path)
    resign(trained, third, lie)
    verdict = audit(trained.path)
    assert (verdict.ok, verdict.problems, honest.outvoted) == (True, [], [])
    assert verdict.contributed == honest.contributed
    assert verdict.outvoted == [
        f"{third.peer_id} has signed something else than most who applied the same: step 1 block 0"
    ]


def test_it_does_not_matter_whose_log_comes_first(
    trained: RunDirectory, third: Identity, volunteers: list[Identity]
) -> None:
    first = min((*volunteers, third), key=lambda one: one.peer_id)
    for block in (0, 1):
        resign(trained, first, drop_id, block=block)
    verdict = audit(trained.path)
    assert (verdict.ok, len(verdict.outvoted)) == (True, 1)
    assert f"{first.peer_id} has signed" in verdict.outvoted[0]
    assert "2 updates, first of step 1 block 0" in verdict.outvoted[0]


def test_who_says_two_things_of_the_same_has_no_voice(
    trained: RunDirectory, third: Identity, volunteers: list[Identity]
) -> None:
    path = log_of(trained, third)
    true = path.read_text()
    resign(trained, third, drop_id)
    path.write_text(true + path.read_text())
    verdict = audit(trained.path)
    assert verdict.lost == 0
    assert [line.split()[0] for line in verdict.outvoted] == [third.peer_id]
    resign(trained, volunteers[0], drop_id)
    assert audit(trained.path).lost == 1, "one against one"


def test_who_has_applied_what_was_never_committed_is_named(
    trained: RunDirectory, volunteers: list[Identity]
) -> None:
    resign(trained, volunteers[0], lambda record: record.update(view=7))
    verdict = audit(trained.path)
    assert set(verdict.broken) == {"I3"}
    assert verdict.outvoted == [
        f"{volunteers[0].peer_id} has signed what was never committed: step 1 block 0"
    ]


def test_where_nothing_is_what_most_say_that_is_said_and_the_coordinator_is_not_accused(
    trained: RunDirectory, volunteers: list[Identity]
) -> None:
    first = min(volunteers, key=lambda one: one.peer_id)
    resign(trained, first, drop_id)
    verdict = audit(trained.path)
    names = ", ".join(sorted(one.peer_id for one in volunteers))
    assert f"step 1 block 0: nothing is what most say: {names} contradict each other" in verdict.problems
    assert (verdict.ok, verdict.outvoted, set(verdict.broken)) == (False, [], {"F1", "F2"})


def test_two_alike_of_three_outvote_the_third(
    trained: RunDirectory, third: Identity, volunteers: list[Identity]
) -> None:
    for volunteer in volunteers:
        resign(trained, volunteer, drop_id)
    verdict = audit(trained.path)
    assert (verdict.lost, "C1" in verdict.broken) == (1, True)
    assert verdict.outvoted[0].startswith(third.peer_id)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda record: record.update(state="00" * 32), "step 1 block 0: the holders' states differ"),
        (lambda record: record.update(gradient="00" * 32), "step 1 block 0: the holders' gradients differ"),
        (lambda record: record["cover"][0][1].append(4), "step 1: microbatches unknown: 4"),
        (
            lambda record: record.update(view=7),
            "step 1 block 0: view 7 plan 5 was applied and never committed",
        ),
    ],
)
def test_disagreement_is_named(
    trained: RunDirectory, volunteers: list[Identity], change: Change, problem: str
) -> None:
    resign(trained, volunteers[0], change)
    verdict = audit(trained.path)
    assert not verdict.ok
    assert problem in verdict.problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda record: record.update(run="0" * 32), "of another run"),
        (lambda record: record.update(peer="Qm" + "a" * 44), "signed by"),
        (lambda record: record.update(cover="none"), "not a valid event"),
        (lambda record: record.pop("state"), "not a valid event"),
    ],
)
def test_event_that_cannot_count_is_named(
    trained: RunDirectory, volunteers: list[Identity], change: Change, problem: str
) -> None:
    resign(trained, volunteers[0], change)
    verdict = audit(trained.path)
    assert not verdict.ok
    assert problem in verdict.problems[0]


@pytest.mark.parametrize("kind", [None, 7, ["applied"], {"kind": "applied"}])
def test_a_line_of_a_kind_that_is_none_is_not_looked_at(
    trained: RunDirectory, volunteers: list[Identity], kind: object
) -> None:
    with log_of(trained, volunteers[0]).open("a") as file:
        file.write(sign_event({"kind": kind}, volunteers[0]) + "\n")
    assert audit(trained.path).ok


def test_same_wrong_gradient_everywhere_is_not_what_was_committed(
    trained: RunDirectory, volunteers: list[Identity]
) -> None:
    for volunteer in volunteers:
        resign(trained, volunteer, lambda record: record.update(gradient="00" * 32))
    assert audit(trained.path).problems == [
        "step 1 block 0: the gradient applied is not the gradient committed"
    ]


def test_silent_volunteers_prove_nothing(trained: RunDirectory, volunteers: list[Identity]) -> None:
    for volunteer in volunteers:
        log_of(trained, volunteer).unlink()
    verdict = audit(trained.path)
    assert not verdict.ok
    assert (verdict.counted, verdict.lost) == (0, 16)


def test_one_silent_volunteer_is_no_breach(trained: RunDirectory, volunteers: list[Identity]) -> None:
    log_of(trained, volunteers[0]).unlink()
    assert audit(trained.path).ok


def without(run: RunDirectory, volunteers: list[Identity], *steps: int) -> None:
    """Nobody has told of the last block at these steps (of the history that survives) yet."""
    block = len(run.manifest.blocks) - 1
    views = {
        record["step"]: record["view"] for record in read_log(run.log_path) if record["kind"] == "commit"
    }
    gone = {(views[step], step, block) for step in steps}
    for volunteer in volunteers:
        path = log_of(run, volunteer)
        lines = path.read_text().splitlines(keepends=True)
        said = [json.loads(line)["record"] for line in lines]
        path.write_text(
            "".join(
                line
                for line, one in zip(lines, said, strict=True)
                if (one["view"], one["step"], one["block"]) not in gone
            )
        )


def test_while_it_is_served_the_last_steps_may_not_have_been_told_of(
    trained: RunDirectory, volunteers: list[Identity]
) -> None:
    without(trained, volunteers, 2, 3)
    with contextlib.closing(Log.open(trained.log_path)):
        verdict = audit(trained.path)
    assert (verdict.ok, verdict.problems) == (True, [])
    assert (verdict.steps, verdict.awaited, verdict.counted) == (2, 2, 8)
    verdict = audit(trained.path)
    assert (verdict.ok, verdict.steps, verdict.awaited, verdict.lost) == (False, 4, 0, 8)
    assert set(verdict.broken) == {"F1", "F3", "F4"}


def test_of_a_stopped_run_the_last_steps_may_not_have_been_told_of(
    fresh: RunDirectory, volunteers: list[Identity]
) -> None:
    """Its reliable peer ended between a commit and the evidence, which comes once the run goes on."""
    run = sign_again(fresh, training=fresh.manifest.training.model_copy(update={"steps": 100}))
    Engine(run, volunteers).train()
    without(run, volunteers, 2, 3)
    verdict = audit(run.path)
    assert (verdict.ok, verdict.problems) == (True, [])
    assert (verdict.steps, verdict.awaited, verdict.counted) == (2, 2, 8)


def test_of_a_stopped_run_a_hole_is_one(fresh: RunDirectory, volunteers: list[Identity]) -> None:
    run = sign_again(fresh, training=fresh.manifest.training.model_copy(update={"steps": 100}))
    Engine(run, volunteers).train()
    without(run, volunteers, 2)
    verdict = audit(run.path)
    assert (verdict.ok, verdict.steps, verdict.awaited, verdict.lost) == (False, 4, 0, 4)


def test_while_it_is_served_a_hole_is_one(trained: RunDirectory, volunteers: list[Identity]) -> None:
    """Of what came later everything has been told."""
    without(trained, volunteers, 2)
    with contextlib.closing(Log.open(trained.log_path)):
        verdict = audit(trained.path)
    assert (verdict.ok, verdict.steps, verdict.awaited, verdict.lost) == (False, 4, 0, 4)


def test_while_it_is_served_so_many_steps_are_not_on_the_way(
    trained: RunDirectory, volunteers: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetpeer.bootstrap.audit.audit.ON_THE_WAY", 1)
    without(trained, volunteers, 2, 3)
    with contextlib.closing(Log.open(trained.log_path)):
        verdict = audit(trained.path)
    assert (verdict.ok, verdict.steps, verdict.awaited, verdict.lost) == (False, 3, 1, 4)


def test_while_it_is_served_nothing_told_is_not_yet_a_proof(
    trained: RunDirectory, volunteers: list[Identity]
) -> None:
    without(trained, volunteers, 0, 1, 2, 3)
    with contextlib.closing(Log.open(trained.log_path)):
        verdict = audit(trained.path)
    assert (verdict.ok, verdict.awaited) == (False, 4)
    assert verdict.problems == ["not everything has been told yet of any committed step"]


def test_torn_last_line_is_no_breach(trained: RunDirectory, volunteers: list[Identity]) -> None:
    with log_of(trained, volunteers[0]).open("a") as file:
        file.write('{"record":{"kind":"app')
    assert audit(trained.path).ok


def test_gap_in_the_history_is_found(trained: RunDirectory) -> None:
    rewrite_log(trained, lambda records: records.pop(2))
    verdict = audit(trained.path)
    assert not verdict.ok
    assert "step 1 was committed when step 0 was due" in verdict.problems
    assert verdict.lost == 4


def test_step_committed_twice_is_found(trained: RunDirectory) -> None:
    rewrite_log(trained, lambda records: records.insert(3, records[2]))
    verdict = audit(trained.path)
    assert "step 0 was committed when step 1 was due" in verdict.problems
    assert "F6" in verdict.broken


def position(records: Records, kind: str) -> int:
    return next(n for n, record in enumerate(records) if record["kind"] == kind)


def test_steps_that_were_begun_anew_break_no_rule(trained: RunDirectory) -> None:
    """Spot checks have found bundles in question: the run goes back to the version that all hold."""

    def anew(records: Records) -> None:
        last = position(records, "checkpoint")
        view = max(record.get("view", 0) for record in records[:last])
        version = max(record["step"] for record in records[:last] if record["kind"] == "commit") + 1
        again = {"kind": "rollback", "term": 1, "view": view + 1, "to_version": version, "why": "anew"}
        records.insert(last, again)

    rewrite_log(trained, anew)
    assert not any("went back" in problem for problem in audit(trained.path).problems)


@pytest.mark.parametrize(
    ("change", "rule", "problem"),
    [
        (
            lambda records: records.insert(3, {"kind": "reign", "term": 1}),
            "F6",
            "term 1 began after term 1",
        ),
        (
            lambda records: records.insert(3, {"kind": "reign", "term": 2}),
            "F6",
            "step 1 was decided in term 1, view 0, while term 2, view 0 was in force",
        ),
        (
            lambda records: records[position(records, "rollback")].update(view=0),
            "F6",
            "view 0 began after view 0",
        ),
        (
            lambda records: records.pop(position(records, "checkpoint")),
            "I5",
            "the run went back to version 2, and the last complete checkpoint was 0",
        ),
    ],
)
def test_decisions_that_break_a_rule_are_named(
    trained: RunDirectory, change: Callable[[Records], Any], rule: str, problem: str
) -> None:
    rewrite_log(trained, change)
    verdict = audit(trained.path)
    assert problem in verdict.problems
    assert rule in verdict.broken
    assert not verdict.ok


def test_an_update_of_a_life_that_was_left_is_found(
    trained: RunDirectory, volunteers: list[Identity]
) -> None:
    """A zombie: it applies under the incarnation that it had before it was fenced."""
    resign(trained, volunteers[0], lambda record: record.update(incarnation=2))
    verdict = audit(trained.path)
    peer = volunteers[0].peer_id
    assert f"{peer}: step 1 block 1 was applied under incarnation 1, which it had left" in verdict.problems
    assert set(verdict.broken) == {"F5"}


def test_an_update_that_is_told_twice_is_found(trained: RunDirectory, volunteers: list[Identity]) -> None:
    path = log_of(trained, volunteers[0])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[-1]]))
    assert set(audit(trained.path).broken) == {"F5"}


def test_leftovers_count_where_their_finder_is_the_holder(
    trained: RunDirectory, volunteers: list[Identity]
) -> None:
    finder, keeper = volunteers
    found = {"kind": "leftover", "run": trained.run_id, "peer": finder.peer_id, "view": 0, "step": 1}
    found |= {"border": 2, "sender": keeper.peer_id, "ids": [0, 1, 2]}
    with log_of(trained, finder).open("a") as file:
        file.write(sign_event(found, finder) + "\n")
    verdict = audit(trained.path)
    assert (verdict.ok, verdict.leftovers) == (True, 2)  # id 2 is in the other one's slot


def test_checkpoint_nobody_had_is_found(trained: RunDirectory) -> None:
    rewrite_log(trained, lambda records: records[-1]["blocks"].__setitem__(0, "00" * 32))
    assert audit(trained.path).problems == ["checkpoint 4 block 0: no holder had that state"]


def test_run_without_steps_is_not_ok(fresh: RunDirectory) -> None:
    verdict = audit(fresh.path)
    assert (verdict.ok, verdict.problems) == (False, ["no step was committed"])


def test_damaged_file_of_the_run_is_an_error(trained: RunDirectory) -> None:
    path = trained.graph_path(trained.manifest.blocks[1])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LocalError, match=r"block-001\.graph") as caught:
        audit(trained.path)
    assert caught.value.code == "HP-RUN-005"
