"""A volunteer's lines at a coordinator: what the audit would read, once, and no more than there can be to
say.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import pytest

from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.log.volunteer_log import read_events, sign_event
from hetpeer.bootstrap.log.volunteer_log_files import AT_FIRST, LINE_BYTES, SLOT_BYTES, VolunteerLogs
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.streams.abuse import Offence, OffenceError


@pytest.fixture
def logs(fresh: RunDirectory) -> VolunteerLogs:
    return logs_of(fresh)


def logs_of(run: RunDirectory) -> VolunteerLogs:
    return VolunteerLogs(run.volunteers, run.run_id, run.manifest, read_log(run.log_path))


def applied(of: RunDirectory, who: Identity, **changes: object) -> dict[str, object]:
    """What a volunteer says of one block of one step, to which each id came from another."""
    ids = range(of.manifest.training.microbatches)
    said = {
        "kind": "applied",
        "run": of.run_id,
        "peer": who.peer_id,
        "incarnation": 1,
        "term": 1,
        "view": 0,
        "cluster": 0,
        "step": 0,
        "batch": 0,
        "base": 0,
        "group": 0,
        "block": 0,
        "plan": 1,
        "cover": [[who.peer_id, [number]] for number in ids],
        "gradient": "0" * 64,
        "state": "0" * 64,
    }
    return said | changes


def others(who: Identity) -> Iterator[str]:
    """Lines that cannot be told from those of a later version, and are long."""
    return (sign_event({"kind": "news", "number": number, "x": "x" * 9000}, who) for number in count())


def say(logs: VolunteerLogs, who: Identity, lines: Iterable[str]) -> None:
    for line in lines:
        logs.keep(who.peer_id, line)


def lines_in(run: RunDirectory, who: Identity) -> list[str]:
    return [line.rstrip("\n") for _, line in read_events(run.volunteers / f"{who.peer_id}.jsonl")]


def committed(run: RunDirectory, step: int) -> Record:
    digests = {str(block): "0" * 64 for block in range(len(run.manifest.blocks))}
    return {"kind": "commit", "term": 1, "view": 0, "step": step, "plan": 1, "gradients": digests}


def test_a_line_interns_no_name(
    fresh: RunDirectory, logs: VolunteerLogs, volunteers: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As each new path does, in a table that only grows."""
    who = volunteers[0]
    first, *more = (sign_event(applied(fresh, who, block=block), who) for block in (0, 1))
    say(logs, who, [first])

    def none(*_: object) -> None:
        raise AssertionError("a name was interned")

    monkeypatch.setattr(sys, "intern", none)
    say(logs, who, more)
    monkeypatch.undo()
    assert lines_in(fresh, who) == [first, *more]


@pytest.mark.parametrize(
    "changes",
    [{"run": "another"}, {"peer": "12D3KooW"}, {"block": -1}, {"cover": 7}, {"state": None}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_the_audit_would_not_read_is_an_offence(
    fresh: RunDirectory, logs: VolunteerLogs, volunteers: list[Identity], changes: dict[str, object]
) -> None:
    who = volunteers[0]
    with pytest.raises(ProtocolError):
        logs.keep(who.peer_id, sign_event(applied(fresh, who, **changes), who))
    with pytest.raises(ProtocolError):
        logs.keep(volunteers[1].peer_id, sign_event(applied(fresh, who), who))
    assert not fresh.volunteers.exists() or not list(fresh.volunteers.iterdir())


def test_an_update_is_told_once_however_often_and_with_whatever_beside_it(
    fresh: RunDirectory, logs: VolunteerLogs, volunteers: list[Identity]
) -> None:
    who = volunteers[0]
    lines = [sign_event(applied(fresh, who, block=block), who) for block in (0, 1)]
    say(logs, who, (*lines, *lines, sign_event(applied(fresh, who, more="x" * 1000), who)))
    assert lines_in(fresh, who) == lines
    again = sign_event(applied(fresh, who, incarnation=2), who)
    logs.keep(who.peer_id, again)
    assert lines_in(fresh, who) == [*lines, again]


def test_nobody_says_more_than_there_can_be_to_say_and_others_are_heard(
    fresh: RunDirectory, logs: VolunteerLogs, volunteers: list[Identity]
) -> None:
    greedy, modest = volunteers
    path = fresh.volunteers / f"{greedy.peer_id}.jsonl"
    with pytest.raises(OffenceError) as caught:
        say(logs, greedy, others(greedy))
    assert caught.value.kind is Offence.FLOOD
    before = path.stat().st_size
    assert before <= AT_FIRST
    logs.recorded(committed(fresh, 0))
    with pytest.raises(OffenceError):
        say(logs, greedy, others(greedy))
    assert path.stat().st_size - before < 1 << 20
    logs.keep(modest.peer_id, sign_event(applied(fresh, modest), modest))


def test_every_honest_line_has_room_also_told_to_a_new_coordinator_at_once(
    fresh: RunDirectory, logs: VolunteerLogs, volunteers: list[Identity]
) -> None:
    """Of all blocks, with each id from another holder, beside leftovers."""
    who, told, steps = volunteers[0], 0, range(10**6, 10**6 + 60)
    sizes = {}
    for step in steps:
        logs.recorded(committed(fresh, step))
        for block in range(len(fresh.manifest.blocks)):
            line = sign_event(applied(fresh, who, step=step, block=block, incarnation=10**9), who)
            sizes[block] = len(line)
            logs.keep(who.peer_id, line)
            told += 1
    assert len(lines_in(fresh, who)) == told
    most = LINE_BYTES + fresh.manifest.training.microbatches * SLOT_BYTES
    assert max(sizes.values()) < most, "what the quota rests on"
    lines, path = lines_in(fresh, who), fresh.volunteers / f"{who.peer_id}.jsonl"
    path.unlink()
    fresh_logs = VolunteerLogs(
        fresh.volunteers, fresh.run_id, fresh.manifest, [committed(fresh, step) for step in steps]
    )
    say(fresh_logs, who, lines)
    assert lines_in(fresh, who) == lines


def test_what_volunteers_of_a_real_run_said_is_taken(trained: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    logs = VolunteerLogs(tmp_path / "elsewhere", trained.run_id, trained.manifest, read_log(trained.log_path))
    for path in trained.volunteers.glob("*.jsonl"):
        for _, line in read_events(path):
            logs.keep(path.stem, line.rstrip("\n"))
        assert (tmp_path / "elsewhere" / path.name).read_bytes() == path.read_bytes()


def test_what_was_said_lately_is_known_and_what_was_said_long_ago_is_forgotten(
    logs: VolunteerLogs, fresh: RunDirectory, volunteers: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetpeer.bootstrap.log.volunteer_log_files.REMEMBERED", 8)
    who = volunteers[0]
    lines = [sign_event(applied(fresh, who, step=step), who) for step in range(10)]
    say(logs, who, lines)
    say(logs, who, lines[-4:])
    assert len(lines_in(fresh, who)) == 10
    say(logs, who, lines[:1])
    assert len(lines_in(fresh, who)) == 11
