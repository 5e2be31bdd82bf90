"""Limits in force: a real daemon and a real throttle, with readings that are given."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.base.runtime import SystemClock, aside
from hetpeer.dht.streams.byte_transport import Throttle
from hetpeer.peer.control.control_messages import ControlRequest
from hetpeer.peer.control.owned_daemon import Notifier
from hetpeer.peer.daemon import limits_in_force as module
from hetpeer.peer.daemon.limits_in_force import LimitsInForce
from hetpeer.peer.daemon.owner_wishes import VolunteerDaemon, Wish
from hetpeer.peer.limits import sensors
from hetpeer.peer.limits.config_file import Month, load_month, save_month
from hetpeer.peer.limits.governor import Readings
from hetpeer.peer.limits.setting_layers import changed
from hetpeer.peer.limits.settings import Settings
from hetpeer.peer.process.hetpeer_children import Child, end_all
from hetpeer.peer.process.home import Home
from hetpeer.peer.process.lifecycle import ALLOWED_CORES, chosen_cores, restrict_cores


class Given:
    """Sensors that say what a test says."""

    def __init__(self) -> None:
        self.battery = False
        self.idle_s: float | None = None

        self.answers = threading.Event()
        """Until it is set, whoever reads hangs."""
        self.answers.set()
        self.reads = 0

    def computes_on(self, asked: str, uuids: tuple[str, ...]) -> None:
        self.device = asked, uuids

    def read(self, _settings: Settings) -> Readings:
        self.reads += 1
        self.answers.wait()
        return Readings(minute=0, on_battery=self.battery, idle_s=self.idle_s)


class Rig:
    def __init__(self, home: Path, settings: Settings) -> None:
        self.daemon = VolunteerDaemon(SystemClock(), asyncio.Event(), Notifier.of_environment())
        self.sensors = Given()
        self.governing = LimitsInForce(settings, self.daemon, Home(home), self.sensors)
        self.throttle = Throttle()
        self.governing.use(self.throttle)

    def set(self, key: str, value: str) -> None:
        self.governing.answer(ControlRequest(do="set", key=key, value=value))

    @property
    def held(self) -> str:
        self.daemon.look()
        return self.daemon.standing.reason


@asynccontextmanager
async def rig(home: Path, settings: Settings | None = None) -> AsyncIterator[Rig]:
    made = Rig(home, settings or Settings())
    async with made.daemon.running(), made.governing.running():
        yield made


async def test_hours_are_those_of_the_zone_in_which_the_machine_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop travels while its daemon runs; the C library looks for its zone once."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    made = Rig(tmp_path, Settings())
    hours = []
    for zone in ("UTC", "XXX-09", "XXX+05"):
        monkeypatch.setenv("TZ", zone)
        await made.governing.look()
        hours.append(time.localtime(86400).tm_hour)
    monkeypatch.undo()
    time.tzset()
    assert hours == [0, 9, 19]


async def test_a_reading_holds_and_a_setting_releases(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        assert made.daemon.wish is Wish.WORK
        made.sensors.battery = True
        await made.governing.look()
        assert (made.daemon.wish, made.held) == (Wish.PAUSE, "battery")
        made.set("when.on_battery", "run")
        await made.governing.look()
        assert made.daemon.wish is Wish.WORK


async def test_what_the_user_holds_the_governor_does_not_release(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        made.governing.answer(ControlRequest(do="pause"))
        await made.governing.look()
        assert (made.daemon.wish, made.held) == (Wish.PAUSE, "user")


async def test_rates_change_while_it_runs(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        assert made.throttle.up.unlimited
        made.set("limits.up", "5mbit")
        assert not made.throttle.up.unlimited
        assert made.throttle.down.unlimited
        made.set("limits.up", "none")
        assert made.throttle.up.unlimited
        assert made.daemon.wish is Wish.WORK


async def test_a_new_worker_is_one_short_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEWAL_S", 0.05)
    async with rig(tmp_path) as made:
        made.set("limits.ram", "20%")
        assert (made.daemon.wish, made.held) == (Wish.PAUSE, "settings")
        await asyncio.wait_for(made.daemon.until(Wish.WORK), 10.0)
        assert made.governing.settings.limits.ram == "20%"
        made.daemon.finish()
        made.set("limits.ram", "30%")
        assert made.daemon.wish is Wish.FINISH, "a hold would end it at once"


async def test_a_device_that_no_worker_starts_on_is_taken_back(tmp_path: Path) -> None:
    async with rig(tmp_path, changed(Settings(), "compute.device", "cuda:7", "")) as made:
        assert not made.governing.keep_device(), "no worker has started on another"
    async with rig(tmp_path) as made:
        made.governing.computes_on("auto", ())
        assert not made.governing.keep_device(), "it is that one which does not start"
        made.set("compute.device", "cuda:7")
        assert made.governing.keep_device()
        told = made.governing.told["compute.device"]
        assert (told.value, told.source) == ("auto", "the worker before")


async def test_a_setting_that_cannot_be_changes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        with pytest.raises(LocalError, match="HP-CONF-003"):
            made.set("limits.up", "fast")
        assert made.governing.settings == Settings()


async def test_it_says_which_settings_are_in_force_and_whence(tmp_path: Path) -> None:
    async with rig(tmp_path, changed(Settings(), "when.hours", "22:00-07:00,12:00-13:00", "")) as made:
        made.governing.sources["when.hours"] = "the command line"
        made.set("limits.up", "5mbit")
        told = made.governing.answer(ControlRequest(do="status")).settings
    assert told.keys() == Settings().flat().keys()
    assert (told["limits.up"].value, told["limits.up"].source) == ("5mbit", "hetpeer config set")
    assert (told["when.hours"].value, told["when.hours"].source) == (
        "22:00-07:00,12:00-13:00",
        "the command line",
    )
    assert (told["limits.ram"].value, told["limits.ram"].source) == ("50%", "default")


async def test_the_cap_holds_until_the_next_month(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    month = "2026-11"
    monkeypatch.setattr(module, "_month", lambda: month)
    save_month(tmp_path, Month(month=month, sent=900_000, received=50_000))
    async with rig(tmp_path, changed(Settings(), "limits.transfer_cap", "1MB", "")) as made:
        assert made.daemon.wish is Wish.WORK
        made.throttle.up.passed(30_000)
        made.throttle.down.passed(20_000)
        await made.governing.look()
        assert (made.held, made.governing.capped) == ("transfer_cap", True)
        month = "2026-12"
        await made.governing.look()
        assert (made.daemon.wish, made.governing.capped) == (Wish.WORK, False)
        made.throttle.up.passed(7)
        assert made.governing.answer(ControlRequest(do="status")).month_bytes == 7
    assert load_month(tmp_path, month) == Month(month="2026-12", sent=7)


async def test_a_home_that_takes_no_file_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    async with rig(home) as made:
        made.throttle.up.passed(7)
        home.rmdir()
        await made.governing.look()
        made.governing.save()
        made.throttle.up.passed(7)
        await made.governing.look()
    assert caplog.text.count("could not be saved") == 1


async def test_a_sensor_that_hangs_leaves_the_others_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was read last goes on counting, with the clock and the month's bytes of now; and it is said
    once.
    """
    monkeypatch.setattr(sensors, "TIMEOUT_S", 0.05)
    async with rig(tmp_path, changed(Settings(), "limits.transfer_cap", "1MB", "")) as made:
        made.sensors.battery = True
        await made.governing.look()
        assert made.held == "battery"
        made.sensors.answers.clear()
        made.sensors.battery = False
        before = made.sensors.reads
        made.throttle.up.passed(2_000_000)
        for _ in range(3):
            await asyncio.wait_for(made.governing.look(), 10.0)
        assert made.held == "battery,transfer_cap"
        assert made.sensors.reads == before + 1, "nobody is asked again who has not answered"
        monkeypatch.setattr(sensors, "minute_of_day", lambda: 12 * 60)
        made.set("when.hours", "22:00-07:00")
        made.set("when.mode", "schedule")
        await made.governing.look()
        assert made.held == "battery,schedule,transfer_cap"
        assert caplog.text.count("the sensors have not answered") == 1
        made.set("when.on_battery", "run")
        await made.governing.look()
        assert made.held == "schedule,transfer_cap", "a setting releases, whoever hangs"
        made.sensors.answers.set()
        for thread in threading.enumerate():
            if thread.name == "sensors":
                thread.join()
        await made.governing.look()
        assert caplog.text.count("the sensors answer again") == 1


def test_a_sensor_that_hangs_keeps_no_process(tmp_path: Path) -> None:
    """Neither its start, nor its end."""
    code = f"""
import asyncio, threading
from pathlib import Path
from hetpeer.peer.limits import sensors
from tests.peer.test_limits_in_force import Given, rig

async def main():
    sensors.TIMEOUT_S = 0.05
    Given.read = lambda *_: threading.Event().wait()
    async with rig(Path({str(tmp_path)!r})) as made:
        print(made.daemon.wish.value)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "work"), done.stderr


async def test_what_fails_aside_is_raised() -> None:
    def fails() -> None:
        raise OSError("no such sensor")

    with pytest.raises(OSError, match="no such sensor"):
        await aside(fails, name="fails")


def test_cores_are_the_last_ones() -> None:
    assert chosen_cores(2, frozenset({0, 1, 5, 7})) == {5, 7}
    assert chosen_cores(9, frozenset({0, 1})) == {0, 1}
    assert chosen_cores(0, frozenset({0, 1})) == {0, 1}


@pytest.mark.skipif(len(ALLOWED_CORES) < 2, reason="there is one core only")
async def test_a_core_less_for_all_processes_and_threads(tmp_path: Path) -> None:
    """Also for a child's threads that are there already."""
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    code = f"{thread}; print('up', flush=True)"
    child = await Child.start("busy", ("-c", code), home=tmp_path, log=tmp_path / "log", command=("python3",))
    try:
        await child.next_line(30.0)
        restrict_cores(1)
        threads = [thread.id for thread in psutil.Process(child.pid).threads()]
        assert len(threads) == 2
        for one in (os.getpid(), *threads):
            assert os.sched_getaffinity(one) == chosen_cores(1)
        restrict_cores(0)
        assert {frozenset(os.sched_getaffinity(one)) for one in (os.getpid(), *threads)} == {ALLOWED_CORES}
    finally:
        restrict_cores(0)
        await end_all([child])
