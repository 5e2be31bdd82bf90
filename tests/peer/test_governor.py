"""Reasons that hold a volunteer back, in given time and with given readings, and the sentences for the
owner.
"""

import asyncio
import contextlib
import math
import re
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.runtime import SystemClock
from hetpeer.peer.control.control_messages import DaemonStatus
from hetpeer.peer.control.owned_daemon import Notifier
from hetpeer.peer.daemon import join_run
from hetpeer.peer.daemon.limits_in_force import LimitsInForce
from hetpeer.peer.daemon.owner_wishes import VolunteerDaemon
from hetpeer.peer.limits.governor import (
    COOL_S,
    COOLER_C,
    GAME_OVER_S,
    MAINS_S,
    SENTENCES,
    Governor,
    Holds,
    Readings,
    Reason,
    explained,
    paused,
)
from hetpeer.peer.limits.sensors import Sensors
from hetpeer.peer.limits.setting_layers import SettingsLayer, changed, merged
from hetpeer.peer.limits.settings import KEYS, Settings
from hetpeer.peer.process.home import Home

BERLIN = ZoneInfo("Europe/Berlin")


def settings(**values: object) -> Settings:
    return merged(
        [SettingsLayer("a test", {key.replace("__", "."): value for key, value in values.items()})]
    ).settings


def reading(**values: object) -> Readings:
    return Readings(**{"minute": 720, **values})


def test_nothing_holds_where_nothing_is_known() -> None:
    assert Governor().look(0.0, reading(), Settings()) == frozenset()
    strict = settings(limits__cpu_temperature_c=60, limits__transfer_cap="1GB")
    assert Governor().look(0.0, reading(), strict) == frozenset()


def test_who_asked_for_only_when_idle_gets_that() -> None:
    governor, idle = Governor(), settings(when__mode="idle", when__idle_after="10m")
    assert governor.look(0.0, reading(idle_s=None), idle) == {Reason.IDLE}
    assert governor.look(1.0, reading(idle_s=599.0), idle) == {Reason.IDLE}
    assert governor.look(2.0, reading(idle_s=600.0), idle) == frozenset()
    assert governor.look(3.0, reading(idle_s=0.0), idle) == {Reason.IDLE}
    assert governor.look(4.0, reading(idle_s=0.0), Settings()) == frozenset()


@pytest.mark.parametrize(
    ("reason", "bad", "good", "steady_s"),
    [
        (Reason.BATTERY, {"on_battery": True}, {"on_battery": False}, MAINS_S),
        (Reason.GAME, {"foreign_gpu": 0.1}, {"foreign_gpu": 0.09}, GAME_OVER_S),
        (Reason.TEMPERATURE, {"gpu_c": 83.0}, {"gpu_c": 83.0 - COOLER_C}, COOL_S),
        (Reason.TEMPERATURE, {"gpu_c": 90.0}, {}, COOL_S),
        (Reason.TRANSFER_CAP, {"month_bytes": 1e9}, {"month_bytes": 1e9 - 1}, 0.0),
    ],
)
def test_it_holds_at_once_and_releases_slowly(
    reason: Reason, bad: dict[str, object], good: dict[str, object], steady_s: float
) -> None:
    governor, wanted = Governor(), settings(limits__transfer_cap="1GB")
    assert governor.look(0.0, reading(**bad), wanted) == {reason}
    for now in (10.0, 10.0 + steady_s - 0.1):
        if steady_s:
            assert governor.look(now, reading(**good), wanted) == {reason}
    if steady_s:
        assert governor.look(20.0, reading(**bad), wanted) == {reason}, "and once more"
    governor.look(100.0, reading(**good), wanted)
    assert governor.look(100.0 + steady_s, reading(**good), wanted) == frozenset()


def test_between_both_temperatures_nothing_changes() -> None:
    governor, warm = Governor(), reading(gpu_c=80.0)
    assert governor.look(0.0, warm, Settings()) == frozenset()
    governor.look(1.0, reading(gpu_c=83.0), Settings())
    assert governor.look(1000.0, warm, Settings()) == {Reason.TEMPERATURE}
    assert governor.look(1001.0, warm, settings(limits__temperature_c=0)) == frozenset()


looks = st.lists(
    st.tuples(
        st.floats(0.1, 40.0),
        st.sampled_from([True, False, None]),
        st.one_of(st.none(), st.floats(20.0, 110.0)),
        st.one_of(st.none(), st.floats(0.0, 1.0)),
    ),
    max_size=60,
)


@given(looks)
def test_no_reason_comes_back_sooner_than_it_may_go(
    history: list[tuple[float, bool | None, float | None, float | None]],
) -> None:
    """A pause for a reason lasts at least as long as its steady time after the last bad reading: nothing
    flaps.
    """
    governor, now = Governor(), 0.0
    bad_at: dict[Reason, float] = {}
    steady = {Reason.BATTERY: MAINS_S, Reason.TEMPERATURE: COOL_S, Reason.GAME: GAME_OVER_S}
    for pause, battery, gpu, game in history:
        now += pause
        found = governor.look(now, reading(on_battery=battery, gpu_c=gpu, foreign_gpu=game), Settings())
        bad = {
            Reason.BATTERY: battery is True,
            Reason.TEMPERATURE: gpu is not None and gpu >= 83.0,
            Reason.GAME: game is not None and game >= 0.1,
        }
        for reason, seconds in steady.items():
            if bad[reason]:
                bad_at[reason] = now
                assert reason in found
            elif reason in bad_at and now - bad_at[reason] < seconds:
                assert reason in found
            elif reason not in bad_at:
                assert reason not in found
        assert found <= steady.keys()


def hours_of(begin: datetime, hours: int, window: str) -> int:
    """How many of the minutes after `begin` are in the window, by the local clock."""
    wanted = settings(when__mode="schedule", when__hours=window)
    count = 0
    for minute in range(hours * 60):
        local = (begin + timedelta(minutes=minute)).astimezone(BERLIN)
        at = reading(minute=local.hour * 60 + local.minute)
        count += not Governor().look(0.0, at, wanted)
    return count


@pytest.mark.parametrize(
    ("day", "window", "minutes"),
    [
        ((2026, 6, 1), "22:00-07:00", 9 * 60),
        ((2026, 3, 28), "22:00-07:00", 8 * 60),
        ((2026, 10, 24), "22:00-07:00", 10 * 60),
        ((2026, 3, 28), "02:00-03:00", 0),
        ((2026, 10, 24), "02:00-03:00", 120),
        ((2026, 6, 1), "12:30-13:00,23:00-00:30", 120),
    ],
)
def test_hours_of_the_clock_on_the_wall(day: tuple[int, int, int], window: str, minutes: int) -> None:
    """From noon to noon of the night in which the clock is put forward or back, too."""
    noon = datetime(*day, 12, tzinfo=BERLIN).astimezone(ZoneInfo("UTC"))
    length = datetime(*day, 12, tzinfo=BERLIN) + timedelta(days=1)
    span = length.astimezone(ZoneInfo("UTC")) - noon
    assert hours_of(noon, round(span.total_seconds() / 3600), window) == minutes


def test_nothing_holds_at_first() -> None:
    assert Holds().at(0.0) == ()
    assert Holds().until(5.0) == 5.0


def test_reasons_come_in_their_order() -> None:
    holds = Holds()
    for reason in (Reason.GAME, Reason.USER, Reason.BATTERY):
        holds.hold(reason)
    assert holds.at(0.0) == (Reason.USER, Reason.BATTERY, Reason.GAME)
    holds.release(Reason.USER)
    holds.release(Reason.SCHEDULE)  # which does not hold
    assert holds.at(1e9) == (Reason.BATTERY, Reason.GAME)
    assert holds.until(0.0) == math.inf


def test_a_time_ends() -> None:
    holds = Holds()
    holds.hold(Reason.USER, until=10.0)
    assert (holds.at(9.9), holds.until(9.9)) == ((Reason.USER,), 10.0)
    assert (holds.at(10.0), holds.until(10.0)) == ((), 10.0)


@pytest.mark.parametrize(("second", "ends"), [(5.0, 5.0), (20.0, 20.0), (math.inf, math.inf)])
def test_the_second_word_counts(second: float, ends: float) -> None:
    holds = Holds()
    holds.hold(Reason.USER, until=10.0)
    holds.hold(Reason.USER, until=second)
    assert holds.until(0.0) == ends


Words = st.tuples(st.sampled_from(Reason), st.none() | st.floats(0, 100), st.floats(0, 5))


@given(st.lists(Words))
def test_it_works_exactly_when_every_reason_is_over(words: list[tuple[Reason, float | None, float]]) -> None:
    """Against a list that is read from the beginning each time. None releases."""
    holds, said, now = Holds(), {}, 0.0
    for reason, until, after in words:
        now += after
        if until is None:
            holds.release(reason)
        else:
            holds.hold(reason, until)
        said[reason] = -math.inf if until is None else until
        held = [reason for reason in Reason if said.get(reason, -math.inf) > now]
        assert list(holds.at(now)) == held
        assert holds.until(now) == max([said[reason] for reason in held], default=now)
        assert not holds.at(holds.until(now))


SETTINGS = Settings()
for key, value in {
    "when.hours": "22:00-07:00,12:00-13:00",
    "limits.transfer_cap": "300GB",
    "limits.gpu_power_w": "150",
}.items():
    SETTINGS = changed(SETTINGS, key, value, "a test")


@pytest.mark.parametrize("reason", Reason)
def test_each_has_a_sentence_that_says_when_it_goes_on(reason: Reason) -> None:
    sentence = SENTENCES[reason](SETTINGS)
    assert "resume" in sentence
    assert sentence.isprintable()
    assert len(sentence) < 160
    named = re.findall(r"\b(?:limits|when)\.\w+", sentence)
    assert set(named) <= set(KEYS)
    assert bool(named) == (reason not in (Reason.USER, Reason.SETTINGS))


def test_numbers_are_those_of_the_settings() -> None:
    hot = paused([Reason.TEMPERATURE], changed(SETTINGS, "limits.cpu_temperature_c", "70", "a test"))
    assert hot.startswith("paused (temperature): too hot for limits.temperature_c = 83 or ")
    assert "limits.cpu_temperature_c = 70:" in hot
    assert "outside 22:00-07:00, 12:00-13:00:" in paused([Reason.SCHEDULE], SETTINGS)
    assert "the 300GB of this month" in paused([Reason.TRANSFER_CAP], SETTINGS)
    both = paused([Reason.USER, Reason.POWER], SETTINGS)
    assert both.startswith("paused (user,power): you asked for it; hetpeer resume ends the pause; resting")
    assert "limits.gpu_power_w = 150:" in both
    everything = explained(tuple(Reason), SETTINGS)
    assert DaemonStatus(state="paused", since=0.0, why=everything).why == everything, (
        "there is room for all of them"
    )


async def test_a_change_of_reason_is_told_and_nothing_twice(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(join_run, "TICK_S", 0.001)
    daemon = VolunteerDaemon(SystemClock(), asyncio.Event(), Notifier(""))
    governing = LimitsInForce(SETTINGS, daemon, Home(tmp_path), Sensors())
    daemon.hold(Reason.USER)
    telling = asyncio.ensure_future(join_run.tell_reasons(governing, daemon, daemon.holding))
    said = ""
    for hold, release, expected in (
        (Reason.GAME, None, "paused (user,game): "),
        (Reason.GAME, Reason.USER, "paused (game): "),
        (Reason.BATTERY, Reason.GAME, "paused (battery): "),
    ):
        daemon.hold(hold)
        if release is not None:
            daemon.release(release)
        async with asyncio.timeout(10):
            while expected not in said:
                await asyncio.sleep(0.001)
                said += capsys.readouterr().err
    daemon.release(Reason.BATTERY)  # that it goes on is said elsewhere
    for _ in range(20):
        await asyncio.sleep(0.001)
    telling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await telling
    said += capsys.readouterr().err
    assert [line.partition(":")[0] for line in said.splitlines()] == [
        "paused (user,game)",
        "paused (game)",
        "paused (battery)",
    ]
