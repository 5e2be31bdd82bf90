"""A volunteer's lines at a coordinator: what the audit would read, of whoever took part, once, and no more
than there can be to say.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.log import evidence_room
from hetpeer.bootstrap.log.evidence_room import RESERVE
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.log.volunteer_log import read_events, sign_event
from hetpeer.bootstrap.log.volunteer_log_files import AT_FIRST, LINE_BYTES, SLOT_BYTES, VolunteerLogs
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.streams.abuse import Offence, OffenceError
from tests.bootstrap.test_record_log import disk_limit


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


def others(of: RunDirectory, who: Identity) -> Iterator[str]:
    """Lines about one update, of one incarnation after the other."""
    return (sign_event(applied(of, who, incarnation=number, x="x" * 9000), who) for number in count())


def say(logs: VolunteerLogs, who: Identity, lines: Iterable[str]) -> None:
    for line in lines:
        logs.keep(who.peer_id, line)


def lines_in(run: RunDirectory, who: Identity) -> list[str]:
    path = run.volunteers / f"{who.peer_id}.jsonl"
    return [line.rstrip("\n") for _, line in read_events(path)] if path.exists() else []


def committed(run: RunDirectory, step: int, *roster: Identity, view: int = 0, blocks: int = 0) -> Record:
    """A commit whose roster are volunteers, each with all blocks, or with the first `blocks`."""
    digests = {str(block): "0" * 64 for block in range(len(run.manifest.blocks))}
    peers = sorted(who.peer_id for who in roster)
    held = [field for number in range(len(peers)) for field in (number, 0, blocks or len(digests))]
    return {
        "kind": "commit",
        "term": 1,
        "view": view,
        "step": step,
        "plan": 1,
        "gradients": digests,
        "batch": step,
        "loss": 1.0,
        "norm": 1.0,
        "coefficient": 1.0,
        "counted": [],
        **({"newcomers": peers} if step in {0, 10**6} else {}),
        "held": held,
    }


def begin(run: RunDirectory, step: int, who: Identity) -> m.Begin:
    return m.Begin(
        line=m.TermView(term=1, view=0),
        step=step,
        batch=step,
        microbatches=run.manifest.training.microbatches,
        roster={who.peer_id: (0, len(run.manifest.blocks))},
        incarnations={who.peer_id: 1},
        tasks=(),
    )


def leftover(of: RunDirectory, who: Identity, step: int) -> str:
    event = {
        "kind": "leftover",
        "run": of.run_id,
        "peer": who.peer_id,
        "incarnation": 1,
        "term": 1,
        "view": 0,
    }
    more = {"cluster": 0, "step": step, "border": 1, "sender": who.peer_id, "ids": [1]}
    return sign_event({**event, **more}, who)


def test_whoever_was_in_no_roster_leaves_no_byte(
    fresh: RunDirectory, logs: VolunteerLogs, volunteers: list[Identity]
) -> None:
    """A stranger with a sound signature, in a run that goes on for a hundred steps without it."""
    member, stranger = volunteers
    for step in range(100):
        logs.recorded(committed(fresh, step, member))
        for block in range(len(fresh.manifest.blocks)):
            logs.keep(
                stranger.peer_id, sign_event(applied(fresh, stranger, step=step, block=block), stranger)
            )
        logs.keep(stranger.peer_id, leftover(fresh, stranger, step))
    assert lines_in(fresh, stranger) == []
    assert not logs.listens_to(stranger.peer_id)
    assert logs.listens_to(member.peer_id)


def test_a_volunteer_speaks_of_its_own_blocks_steps_and_view_and_of_old_ones_whenever_it_comes_back(
    fresh: RunDirectory, logs: VolunteerLogs, volunteers: list[Identity]
) -> None:
    who, other = volunteers
    blocks = len(fresh.manifest.blocks)
    for step in range(6):
        logs.recorded(committed(fresh, step, who, other, blocks=blocks - 1 if step == 3 else 0))
    both = committed(fresh, 6, who, other)
    logs.recorded(both | {"held": both["held"][:3]})
    first = min(volunteers, key=lambda one: one.peer_id)
    for step, block in ((5, 0), (0, 1), (3, blocks - 2)):
        logs.keep(first.peer_id, sign_event(applied(fresh, first, step=step, block=block), first))
    logs.keep(first.peer_id, sign_event(applied(fresh, first, step=6), first))
    kept = lines_in(fresh, first)
    assert len(kept) == 4
    logs.keep(first.peer_id, sign_event(applied(fresh, first, step=3, block=blocks - 1), first))
    logs.keep(first.peer_id, sign_event(applied(fresh, first, step=7), first))
    logs.keep(first.peer_id, sign_event(applied(fresh, first, step=5, view=1), first))
    last = next(one for one in volunteers if one is not first)
    logs.keep(last.peer_id, sign_event(applied(fresh, last, step=6), last))
    assert (lines_in(fresh, first), lines_in(fresh, last)) == (kept, [])
    logs.recorded(committed(fresh, 5, who, other, view=1))
    logs.keep(first.peer_id, sign_event(applied(fresh, first, step=5, view=1), first))
    assert len(lines_in(fresh, first)) == 5


def test_leftovers_are_kept_of_whoever_was_told_to_begin_the_step(
    fresh: RunDirectory, logs: VolunteerLogs, volunteers: list[Identity]
) -> None:
    who = volunteers[0]
    line = leftover(fresh, who, 7)
    logs.keep(who.peer_id, line)
    assert lines_in(fresh, who) == []
    logs.began(who.peer_id, begin(fresh, 7, who))
    logs.keep(who.peer_id, line)
    logs.keep(who.peer_id, leftover(fresh, who, 8))
    assert lines_in(fresh, who) == [line]


def test_a_kind_that_no_version_writes_is_not_kept(
    fresh: RunDirectory, logs: VolunteerLogs, volunteers: list[Identity]
) -> None:
    who = volunteers[0]
    logs.recorded(committed(fresh, 0, who))
    assert logs.keep(who.peer_id, sign_event({"kind": "news", "x": "x" * 9000}, who))
    assert lines_in(fresh, who) == []


def test_a_log_of_an_earlier_version_names_the_volunteers_that_counted(
    fresh: RunDirectory, logs: VolunteerLogs, volunteers: list[Identity]
) -> None:
    who, other = volunteers
    record = dict(committed(fresh, 0, who)) | {"counted": [0, 12]}
    del record["held"]
    logs.recorded(record)
    for one in (who, other):
        logs.keep(one.peer_id, sign_event(applied(fresh, one), one))
    assert (len(lines_in(fresh, who)), len(lines_in(fresh, other))) == (1, 0)


def test_evidence_leaves_a_gigabyte_and_three_quarters_of_the_disk(
    fresh: RunDirectory, volunteers: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    who, free = volunteers[0], [RESERVE + 4000]
    monkeypatch.setattr(evidence_room, "free_bytes", lambda _: free[0])
    logs = logs_of(fresh)
    logs.recorded(committed(fresh, 0, who))
    lines = [sign_event(applied(fresh, who, block=block), who) for block in (0, 1)]
    assert not logs.keep(who.peer_id, lines[0]), "a quarter of what is left is less than a line"
    assert not logs.has_room
    free[0] = RESERVE + 4 * len(lines[0]) + 100
    assert logs.keep(who.peer_id, lines[0])
    assert not logs.keep(who.peer_id, lines[1])
    free[0] += 1 << 30
    assert logs.has_room
    assert logs.keep(who.peer_id, lines[1])
    assert lines_in(fresh, who) == lines
    free[0] = RESERVE - 1
    assert not logs_of(fresh).has_room


def test_a_disk_that_is_full_nevertheless_is_no_error(
    fresh: RunDirectory, logs: VolunteerLogs, volunteers: list[Identity]
) -> None:
    who = volunteers[0]
    logs.recorded(committed(fresh, 0, who))
    line = sign_event(applied(fresh, who), who)
    with disk_limit(len(line) - 1):
        assert not logs.keep(who.peer_id, line)
    assert lines_in(fresh, who) == []
    assert logs.keep(who.peer_id, line)


def test_a_line_interns_no_name(
    fresh: RunDirectory, logs: VolunteerLogs, volunteers: list[Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As each new path does, in a table that only grows."""
    who = volunteers[0]
    logs.recorded(committed(fresh, 0, who))
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
    logs.recorded(committed(fresh, 0, who))
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
    logs.recorded(committed(fresh, 0, *volunteers))
    with pytest.raises(OffenceError) as caught:
        say(logs, greedy, others(fresh, greedy))
    assert caught.value.kind is Offence.FLOOD
    before = path.stat().st_size
    assert before <= AT_FIRST + (1 << 17)
    logs.recorded(committed(fresh, 1, *volunteers))
    with pytest.raises(OffenceError):
        say(logs, greedy, others(fresh, greedy))
    assert path.stat().st_size - before < 1 << 17
    logs.keep(modest.peer_id, sign_event(applied(fresh, modest), modest))
    assert len(lines_in(fresh, modest)) == 1


def test_every_honest_line_has_room_also_told_to_a_new_coordinator_at_once(
    fresh: RunDirectory, logs: VolunteerLogs, volunteers: list[Identity]
) -> None:
    """Of all blocks, with each id from another holder, beside leftovers."""
    who, told, steps = volunteers[0], 0, range(10**6, 10**6 + 60)
    sizes = {}
    for step in steps:
        logs.recorded(committed(fresh, step, who))
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
        fresh.volunteers, fresh.run_id, fresh.manifest, [committed(fresh, step, who) for step in steps]
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
    for step in range(10):
        logs.recorded(committed(fresh, step, who))
    lines = [sign_event(applied(fresh, who, step=step), who) for step in range(10)]
    say(logs, who, lines)
    say(logs, who, lines[-4:])
    assert len(lines_in(fresh, who)) == 10
    say(logs, who, lines[:1])
    assert len(lines_in(fresh, who)) == 11
