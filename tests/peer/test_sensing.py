"""Sensors: a kernel's files made by hand, programs that are there or not, and this machine, which never makes them fail."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hetpeer.peer.daemon import sensing
from hetpeer.peer.daemon.sensing import Sensors, idle_s, on_battery
from hetpeer.peer.daemon.settings import WORKER, Layer, merged
from hetpeer.peer.daemon.xidle import x_idle_s

MAINS, OFF = {"type": "Mains", "online": "1"}, {"type": "Mains", "online": "0"}
FULL, USED = {"type": "Battery", "status": "Full"}, {"type": "Battery", "status": "Discharging"}
MOUSE = {"type": "Battery", "status": "Discharging", "scope": "Device"}


@pytest.mark.parametrize(
    ("supplies", "battery"),
    [
        ([], None),
        ([MAINS], None),
        ([MOUSE], None),
        ([MAINS, FULL], False),
        ([MAINS, USED], False),  # more is taken than the supply gives
        ([OFF, USED], True),
        ([OFF, FULL], True),
        ([USED], True),
        ([FULL], False),
        ([MAINS, MOUSE, FULL], False),
    ],
)
def test_batteries(tmp_path: Path, supplies: list[Mapping[str, str]], battery: bool | None) -> None:
    for number, supply in enumerate(supplies):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in supply.items():
            (folder / name).write_text(f"{text}\n")
    assert on_battery(tmp_path) is battery
    assert on_battery(tmp_path / "gone") is None


def test_a_volunteers_worker_is_no_game_whoevers_it_is(tmp_path: Path) -> None:
    """Nor is what cannot be seen from here; everything else is."""

    def started(*arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "input()", *arguments], stdin=subprocess.PIPE)

    with started("-m", WORKER) as worker, started("game") as game:
        found = [sensing._is_ours(one.pid) for one in (worker, game)]
        for one in (worker, game):
            one.kill()
    assert found == [True, False]
    assert sensing._is_ours(game.pid), "it has ended"


def program(folder: Path, text: str) -> None:
    """A busctl that says this of whatever it is asked."""
    path = folder / "busctl"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all programs that there are."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(sensing, "ASK_S", 60.0)
    return tmp_path


def test_the_desktop_says_who_is_idle(only: Path) -> None:
    program(only, 'case "$*" in *Mutter*) echo "t 61500";; *) echo "v b false";; esac')
    assert idle_s() == 61.5


def test_logind_says_it_where_no_desktop_does(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensing.time, "time", lambda: 1000.0)
    program(only, 'case "$*" in *Mutter*) exit 1;; *Since*) echo "v t 900000000";; *) echo "v b true";; esac')
    assert idle_s() == 100.0
    program(only, 'case "$*" in *Mutter*) exit 1;; *) echo "v b false";; esac')
    assert idle_s() == 0.0


@pytest.mark.parametrize("text", ["exit 1", "echo nonsense", "exec sleep 60"])
def test_nobody_says_it(only: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sensing, "ASK_S", 0.2)
    program(only, text)
    assert idle_s() is None


def test_an_x_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":4711")
    assert x_idle_s() is None


def test_this_machine(caplog: pytest.LogCaptureFixture, only: Path) -> None:
    """Whatever it has, nothing fails; that nobody can say who is idle is said once."""
    program(only, "exit 1")
    wanted = merged([Layer("", {"when.mode": "idle", "limits.cpu_temperature_c": 90})]).settings
    sensors = Sensors()
    for _ in range(2):
        found = sensors.read(wanted, 5.0)
    assert (found.idle_s, found.month_bytes) == (None, 5.0)
    assert 0 <= found.minute < 1440
    assert caplog.text.count("is not known here") == 1
