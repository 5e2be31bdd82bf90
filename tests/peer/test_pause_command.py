"""What is asked of a volunteer's daemon, and what it says of itself, by a given clock."""

import asyncio
import math
from pathlib import Path

import pytest
import typer

from hetpeer.averaging.member.member_life import Phase
from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.cli.options import parse_duration
from hetpeer.peer.cli.volunteer.pause_command import standing_text
from hetpeer.peer.control import owned_daemon as module
from hetpeer.peer.control.control_messages import ControlRequest, DaemonStatus
from hetpeer.peer.daemon.owner_wishes import VolunteerDaemon, Wish
from hetpeer.peer.daemon.volunteer_life import doing
from hetpeer.peer.limits.governor import Reason

ALL = (Wish.WORK, Wish.PAUSE, Wish.FINISH, Wish.STOP)


class Clock:
    """Stands still unless it is moved; the wall clock is 1000 s ahead."""

    def __init__(self) -> None:
        self.now = 0.0

    def boottime(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1000.0 + self.now


class Heard:
    """What systemd would be told."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def tell(self, word: str, value: str = "1") -> None:
        self.words.append(f"{word}={value}")

    async def watch_forever(self) -> None: ...


class Rig:
    def __init__(self) -> None:
        self.clock, self.leaving, self.heard = Clock(), asyncio.Event(), Heard()
        self.daemon = VolunteerDaemon(self.clock, self.leaving, self.heard)

    def asked(self, do: str, for_s: float | None = None) -> tuple[str, str]:
        standing = self.daemon.answer(ControlRequest(do=do, for_s=for_s))
        return standing.state, standing.reason


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize(
    ("asked", "wish"),
    [
        ([], Wish.WORK),
        (["resume"], Wish.WORK),
        (["pause"], Wish.PAUSE),
        (["pause", "pause"], Wish.PAUSE),
        (["pause", "resume"], Wish.WORK),
        (["finish"], Wish.FINISH),
        (["finish", "finish", "resume"], Wish.FINISH),
        (["finish", "pause"], Wish.STOP),
        (["finish", "pause", "resume"], Wish.STOP),
        (["pause", "finish"], Wish.STOP),
        (["pause", "stop"], Wish.STOP),
        (["stop", "resume", "pause", "finish"], Wish.STOP),
    ],
)
async def test_wishes(rig: Rig, asked: list[str], wish: Wish) -> None:
    for word in asked:
        rig.asked(word)
    assert rig.daemon.wish is wish
    assert rig.leaving.is_set() == (wish is Wish.STOP)
    assert ("STOPPING=1" in rig.heard.words) == (wish is Wish.STOP)


async def test_a_pause_ends_by_itself_and_the_last_word_counts(rig: Rig) -> None:
    assert rig.asked("pause", 60.0) == ("paused", "user")
    assert rig.daemon.standing.until == 1060.0
    rig.clock.now = 50.0
    rig.asked("pause", 60.0)
    rig.clock.now = 109.0
    assert rig.daemon.wish is Wish.PAUSE
    assert rig.daemon.standing.since == 1000.0  # of the first
    rig.clock.now = 110.0
    assert rig.daemon.wish is Wish.WORK
    assert rig.daemon.standing.until is None
    rig.asked("pause", 60.0)
    rig.asked("pause")
    assert rig.daemon.standing.until is None
    rig.clock.now = 1e9
    assert rig.daemon.wish is Wish.PAUSE


async def test_every_reason_holds(rig: Rig) -> None:
    rig.daemon.hold(Reason.GAME)
    assert rig.asked("pause", 10.0) == ("paused", "user,game")
    assert rig.daemon.standing.until is None
    assert rig.asked("resume") == ("paused", "game")
    rig.daemon.release(Reason.GAME)
    assert rig.daemon.wish is Wish.WORK


async def test_a_pause_is_explained_and_nothing_else(rig: Rig) -> None:
    rig.daemon.explained_by(lambda reasons: f"{len(reasons)} reasons")
    assert rig.daemon.standing.why == ""
    rig.daemon.hold(Reason.GAME)
    rig.daemon.hold(Reason.BATTERY)
    assert rig.daemon.standing.why == "2 reasons"
    rig.daemon.stop()
    assert (rig.daemon.standing.state, rig.daemon.standing.why) == ("draining", "")


async def test_who_waits_hears_of_a_wish_that_time_brings(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.001)
    async with rig.daemon.running():
        rig.asked("pause", 60.0)
        waiting = asyncio.ensure_future(rig.daemon.until(Wish.WORK))
        rig.clock.now = 59.9
        for _ in range(3):
            await asyncio.sleep(0.002)
        assert not waiting.done()
        rig.clock.now = 60.0
        assert await asyncio.wait_for(waiting, 5.0) is Wish.WORK


async def test_it_finishes_by_itself_when_its_time_is_over(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.001)
    async with rig.daemon.running():
        rig.daemon.finish_after(60.0)
        rig.asked("pause", 30.0)
        assert rig.daemon.standing.ends == 1060.0
        rig.clock.now = 59.9
        assert rig.daemon.wish is Wish.WORK
        waiting = asyncio.ensure_future(rig.daemon.until(Wish.FINISH, Wish.STOP))
        rig.clock.now = 60.0
        assert await asyncio.wait_for(waiting, 5.0) is Wish.FINISH
        assert (rig.daemon.standing.reason, rig.daemon.standing.ends) == ("finish", None)
    assert capsys.readouterr().err == "its time (--for) is over: it leaves when the current step is done\n"


async def test_who_is_paused_when_its_time_is_over_leaves_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.001)
    async with rig.daemon.running():
        rig.daemon.finish_after(60.0)
        rig.asked("pause")
        rig.clock.now = 60.0
        assert await asyncio.wait_for(rig.daemon.until(Wish.FINISH, Wish.STOP), 5.0) is Wish.STOP


async def test_who_waits_hears_of_a_signal(rig: Rig) -> None:
    async with rig.daemon.running():
        rig.asked("pause")
        waiting = asyncio.ensure_future(rig.daemon.until(Wish.WORK, Wish.STOP))
        await asyncio.sleep(0)
        rig.leaving.set()
        assert await asyncio.wait_for(waiting, 5.0) is Wish.STOP


async def test_a_pause_that_was_over_at_once_interrupts_nobody(rig: Rig) -> None:
    waiting = asyncio.ensure_future(rig.daemon.until(Wish.PAUSE))
    await asyncio.sleep(0)
    rig.asked("pause")
    rig.asked("resume")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_what_it_does_and_since_when(rig: Rig) -> None:
    daemon = rig.daemon
    assert daemon.standing == DaemonStatus(state="starting", since=1000.0)
    daemon.joined(lambda: ["/ip4/1.2.3.4"] * 20)
    assert daemon.standing.addresses == ("/ip4/1.2.3.4",) * 8
    phase = [Phase.JOINING]
    daemon.follow(lambda: doing(phase[0], in_touch=True))
    rig.clock.now = 5.0
    phase[0] = Phase.TRAINING
    assert (daemon.standing.state, daemon.standing.since) == ("training", 1005.0)
    rig.clock.now = 7.0
    phase[0] = Phase.REDUCING
    assert (daemon.standing.state, daemon.standing.since) == ("training", 1005.0)
    rig.asked("finish")
    assert (daemon.standing.state, daemon.standing.reason) == ("draining", "finish")
    daemon.stop()
    assert (daemon.standing.state, daemon.standing.reason) == ("draining", "finish")
    assert rig.heard.words == [
        "READY=1",
        "STATUS=joining",
        "STATUS=training",
        "STATUS=draining (finish)",
        "STOPPING=1",
    ]


async def test_the_end_is_told(rig: Rig) -> None:
    async with rig.daemon.running():
        rig.asked("stop")
    assert rig.heard.words[-2:] == ["STATUS=draining (stop)", "STATUS=stopped"]
    other = Rig()
    with pytest.raises(LocalError):
        async with other.daemon.running():
            raise LocalError("HP-NET-002", "nobody answers", why="a test", fix="nothing")
    assert other.heard.words == ["STATUS=failed (HP-NET-002)"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("1h30m", 5400), ("45m", 2700), ("2d", 172800), ("90s", 90), ("1.5H", 5400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "m", "30", "1h 30m", "30m1h", "-1h", "0s", "9999d", "9" * 400 + "d", "nan"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_duration(text)


def test_a_standing_in_words(tmp_path: Path) -> None:
    text = standing_text(DaemonStatus(state="paused", reason="user", since=0.0, until=math.pi * 1e9))
    assert text.startswith("paused (user) since 19")
    assert ", until 2069-" in text
    assert "; leaves at 2069-" in standing_text(DaemonStatus(state="training", since=0.0, ends=math.pi * 1e9))
