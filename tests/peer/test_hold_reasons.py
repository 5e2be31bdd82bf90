"""What holds a volunteer back, as its owner is told."""

import asyncio
import contextlib
import re

import pytest

from hetpeer.dht.base.runtime import SystemClock
from hetpeer.peer.control.control_messages import DaemonStatus
from hetpeer.peer.daemon import join_run
from hetpeer.peer.daemon.limits_in_force import LimitsInForce
from hetpeer.peer.daemon.owner_wishes import VolunteerDaemon
from hetpeer.peer.limits.hold_reasons import SENTENCES, explained, paused
from hetpeer.peer.limits.holds import Reason
from hetpeer.peer.limits.sensors import Sensors
from hetpeer.peer.limits.settings import KEYS, Settings
from hetpeer.peer.process.home import Home
from hetpeer.peer.process.systemd_notify import Notifier

SETTINGS = (
    Settings()
    .changed("when.hours", "22:00-07:00,12:00-13:00", "a test")
    .changed("limits.transfer_cap", "300GB", "a test")
    .changed("limits.gpu_power_w", "150", "a test")
)


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
    hot = paused([Reason.TEMPERATURE], SETTINGS.changed("limits.cpu_temperature_c", "70", "a test"))
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
