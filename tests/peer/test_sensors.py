"""Sensors: a kernel's files made by hand, programs that are there or not, and this machine, which never
makes them fail.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path

import pytest

from hetpeer.peer.limits import sensors
from hetpeer.peer.limits.nvml import Gpus
from hetpeer.peer.limits.sensors import Sensors, idle_s, idle_told, on_battery, x_idle_s
from hetpeer.peer.limits.setting_layers import SettingsLayer, changed, merged
from hetpeer.peer.limits.settings import WORKER, Settings

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
        command = [sys.executable, "-c", "print(flush=True); input()", *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    with started("-m", WORKER) as worker, started("game") as game:
        for one in (worker, game):  # the kernel shows no command line until the program is loaded
            assert one.stdout is not None
            assert one.stdout.readline()
        found = [sensors._is_ours(one.pid) for one in (worker, game)]
        for one in (worker, game):
            one.kill()
    assert found == [True, False]
    assert sensors._is_ours(game.pid), "it has ended"


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
    monkeypatch.setattr(sensors, "ASK_S", 60.0)
    return tmp_path


def test_the_desktop_says_who_is_idle(only: Path) -> None:
    program(only, 'case "$*" in *Mutter*) echo "t 61500";; *) echo "v b false";; esac')
    assert idle_s() == 61.5
    assert idle_told() == {"GNOME over D-Bus": 61.5, "logind": 0.0}


def test_logind_says_it_where_no_desktop_does(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors.time, "time", lambda: 1000.0)
    program(only, 'case "$*" in *Mutter*) exit 1;; *Since*) echo "v t 900000000";; *) echo "v b true";; esac')
    assert idle_s() == 100.0
    program(only, 'case "$*" in *Mutter*) exit 1;; *) echo "v b false";; esac')
    assert idle_s() == 0.0


@pytest.mark.parametrize("text", ["exit 1", "echo nonsense", "exec sleep 60"])
def test_nobody_says_it(only: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sensors, "ASK_S", 0.2)
    program(only, text)
    assert idle_s() is None


def test_an_x_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":4711")
    assert x_idle_s() is None


X_SERVER = """
import socket, struct, sys

server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
display, _ = server.accept()
display.recv(4096)
visual = struct.pack("<IBBHIIIxxxx", 33, 4, 8, 256, 0xFF0000, 0xFF00, 0xFF)
depth = struct.pack("<BxHxxxx", 24, 1) + visual
sizes = 256, 32, 0xFFFFFF, 0, 0, 800, 600, 200, 150, 1, 1, 33, 0, 0, 24, 1
screen = struct.pack("<IIIIIHHHHHHIBBBB", *sizes) + depth
formats = struct.pack("<BBBxxxxx", 24, 32, 32)
limits = 1, 1 << 21, (1 << 21) - 1, 256, 4, 65535, 1, 1, 0, 0, 32, 32, 8, 255
about = struct.pack("<IIIIHHBBBBBBBBxxxx", *limits)
setup = about + b"fake" + formats + screen
display.sendall(struct.pack("<BxHHH", 1, 11, 0, len(setup) // 4) + setup)
number, data = 0, b""
while True:
    data += display.recv(4096)
    while len(data) >= 4 and len(data) >= (length := 4 * struct.unpack("<H", data[2:4])[0]):
        code, request, data, number = data[0], data[:length], data[length:], number + 1
        if b"MIT-SCREEN-SAVER" in request:
            sys.exit()  # its session ends
        if code in (20, 43, 98):  # a property, the focus, an extension: there is none
            display.sendall(struct.pack("<BxHI24x", 1, number, 0))
"""


def test_an_x_server_that_goes_away_while_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Xlib would end the process."""
    if not (find_library("X11") and find_library("Xss")):
        pytest.skip("no X11 library")
    with subprocess.Popen([sys.executable, "-c", X_SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        number = int(server.stdout.readline()) - 6000
        environment = {**os.environ, "DISPLAY": f"127.0.0.1:{number}"}
        environment.pop("WAYLAND_DISPLAY", None)
        asks = "from hetpeer.peer.limits.sensors import x_idle_s; print(x_idle_s(), x_idle_s())"
        done = subprocess.run(
            [sys.executable, "-c", asks],
            check=False,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert server.wait(10) == 0, "it was asked"
    assert (done.returncode, done.stdout) == (0, "None None\n")


class Cards:
    """Of a watch over GPUs, what it was told to heed."""

    heeded: list[tuple[str, ...] | None]

    def __init__(self) -> None:
        self.heeded = []

    def heed(self, uuids: tuple[str, ...] | None) -> None:
        self.heeded.append(uuids)

    def hottest(self) -> None: ...

    def foreign_share(self, _is_ours: object) -> None: ...

    def states(self, _now: float) -> tuple[()]:
        return ()


def test_the_gpu_that_is_heeded_is_the_one_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker said for one setting is not true of another; the processor is no GPU, whoever says so."""
    cards = Cards()
    monkeypatch.setattr(sensors, "GpuWatch", lambda: cards)
    first, second, cpu = (
        changed(Settings(), "compute.device", name, "") for name in ("auto", "cuda:1", "cpu")
    )
    readings = Sensors()
    readings.read(first)
    readings.computes_on("auto", ("GPU-1",))
    for settings in (first, second, cpu, first):
        readings.read(settings)
    readings.computes_on("cuda:1", ("GPU-2",))
    readings.read(second)
    assert cards.heeded == [None, ("GPU-1",), None, (), ("GPU-1",), ("GPU-2",)]


@pytest.mark.parametrize(("device", "told"), [("auto", 1), ("cpu", 0), ("cpu,cpu", 0)])
def test_a_gpu_that_torch_cannot_use_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str, told: int
) -> None:
    """To whoever has not asked for the processor."""
    monkeypatch.setattr(sensors, "gpus", lambda: Gpus(driver="580", names=("A10",)))
    settings, readings = changed(Settings(), "compute.device", device, ""), Sensors()
    readings.read(settings)
    assert "HP-GPU-004" not in caplog.text, "nobody has said yet what a worker finds"
    readings.computes_on(device, ())
    for _ in range(2):
        readings.read(settings)
    assert caplog.text.count("HP-GPU-004: torch cannot use A10") == told
    assert [error.code for error in readings.read(settings).warnings] == ["HP-GPU-004"] * told
    assert readings.read(changed(settings, "compute.device", "cuda:1", "")).warnings == (), "nobody has tried"


def test_this_machine(caplog: pytest.LogCaptureFixture, only: Path) -> None:
    """Whatever it has, nothing fails; that nobody can say who is idle is said once."""
    program(only, "exit 1")
    wanted = merged([SettingsLayer("", {"when.mode": "idle", "limits.cpu_temperature_c": 90})]).settings
    readings = Sensors()
    for _ in range(2):
        found = readings.read(wanted)
    assert found.idle_s is None
    assert 0 <= found.minute < 1440
    assert caplog.text.count("not known whether anybody uses this machine") == 1
    assert [error.code for error in found.warnings] == ["HP-SYS-007"]
