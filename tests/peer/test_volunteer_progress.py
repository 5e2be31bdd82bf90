"""What a volunteer tells of itself, and what it measures whoever listens."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from hetpeer.averaging.member.member_life import Phase
from hetpeer.bootstrap.run.manifest import Manifest, validated
from hetpeer.peer.daemon import volunteer_progress
from hetpeer.peer.daemon.volunteer_progress import (
    EVERY_S,
    SHOWN_AFTER_S,
    STALLED_S,
    WORTH_TELLING,
    Arriving,
    VolunteerProgress,
    _waiting_line,
)
from hetpeer.peer.training.volunteer_figures import SPEED_S, VolunteerFigures
from tests.bootstrap.test_manifest import make_fields

MANIFEST = validated(Manifest, make_fields())


def volunteer(phase: Phase, *, spared: bool = False, **figures: int) -> Any:
    """One in this phase, with blocks 1 and 2; `spared`: as a backup."""
    return SimpleNamespace(
        figures=VolunteerFigures(**figures),
        member=SimpleNamespace(
            place=(1, 3), phase=phase, life=SimpleNamespace(is_spared=spared), version=7, loss=2.5
        ),
        session=SimpleNamespace(is_up=True, leaving=False),
        tokens_per_second=12.0,
    )


def test_the_speed_is_that_of_its_work_whenever_somebody_looks() -> None:
    speed = VolunteerFigures().speed
    assert speed.at(0.0) == 0.0
    speed.done(10.0)
    for second in range(8):
        speed.done(11.0 + second)
        assert speed.at(11.0 + second) == (1.0 if 1 + second >= SPEED_S else 0.0)
    assert speed.at(22.5) == pytest.approx(3 / 7.5), "since the last look that was long enough"
    assert speed.at(100.0) == 0.0, "nothing was done since"


def test_a_state_arrives() -> None:
    arriving = Arriving()
    assert arriving.look(5_000, False, 0.0) is None
    assert arriving.look(6_000, True, 1.0) is None
    assert arriving.look(6_000 + WORTH_TELLING // 2, True, 2.0) is None
    assert arriving.look(6_000 + 3 * WORTH_TELLING, True, 3.0) == 3 * WORTH_TELLING
    assert arriving.look(6_100 + 3 * WORTH_TELLING, True, 4.0) == 3 * WORTH_TELLING + 100
    assert arriving.look(6_200 + 3 * WORTH_TELLING, True, 3.0 + STALLED_S) is None, "what comes is not it"
    assert arriving.look(6_000 + 5 * WORTH_TELLING, True, 99.0) == 5 * WORTH_TELLING
    assert arriving.look(6_000 + 5 * WORTH_TELLING, False, 100.0) is None
    assert arriving.look(6_000 + 5 * WORTH_TELLING, True, 101.0) is None, "another one"


def test_lines_while_a_state_comes_and_when_it_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    received = [0]
    made = VolunteerProgress(MANIFEST, lambda: received[0])
    syncing = volunteer(Phase.SYNCING)
    now, said = 100.0, []
    for number in range(80):
        if 10 <= number < 40:
            received[0] += WORTH_TELLING
        made._show(syncing, now + number / 2, number / 2)
        said += capsys.readouterr().err.splitlines()
    first = next(number for number in range(80) if number / 2 > SHOWN_AFTER_S) / 2
    assert first < 10 / 2
    fetching = [line for line in said if line.startswith("fetching")]
    assert said[:2] == ["getting blocks 1-2 ready", "waiting for the state of blocks 1-2"]
    assert len(fetching) == (30 / 2 + STALLED_S) // EVERY_S
    assert fetching[0].startswith("fetching the state of blocks 1-2: ")
    assert fetching[-1].endswith("30 MiB received, of at most 96 B and the first data")
    assert said[-1] == "waiting for the state of blocks 1-2"


async def test_what_was_done_in_all_lives_is_thanked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(volunteer_progress, "LOOK_S", 0.001)
    made = VolunteerProgress(MANIFEST, lambda: 0)
    assert made.thanks == ""
    for microbatches, credited, thanks in (
        (1_000, 0, "thank you: 1,000 microbatches computed here; none is part of a committed step yet"),
        (
            234,
            1_500,
            "thank you: 1,234 microbatches computed here, for a credit of 1,500 samples x blocks",
        ),
    ):
        life = volunteer(Phase.TRAINING, microbatches=microbatches, credited=credited)
        showing = asyncio.ensure_future(made.show_forever(life))
        async with asyncio.timeout(10):
            while not capsys.readouterr().err and microbatches == 1_000:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0)  # it has begun
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing
        assert made.thanks == thanks


def test_a_backup_is_told_what_it_is_there_for() -> None:
    line = _waiting_line(volunteer(Phase.READY, spared=True), 0.0)
    assert line.startswith("backup for blocks 1-2: ")


def test_a_volunteer_that_leaves_waits_for_nobody() -> None:
    leaving = volunteer(Phase.READY)
    leaving.session = SimpleNamespace(is_up=False, leaving=True)
    assert _waiting_line(leaving, 60.0) == ""
    leaving.session.leaving = False
    assert _waiting_line(leaving, 60.0) == "waiting for the coordinator: it does not answer"
