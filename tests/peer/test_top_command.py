"""`hetpeer top`: what it shows, and its screen before a real control socket with a real daemon's wishes behind it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.peer.cli.volunteer.top_command import top
from hetpeer.peer.control.control_messages import DaemonStatus, LinkStatus, VolunteerStatus, decode_answer
from hetpeer.peer.control.control_server import serving
from hetpeer.peer.daemon.owner_wishes import DaemonState, VolunteerDaemon
from hetpeer.peer.limits.nvml import GpuLoad
from hetpeer.peer.process.systemd_notify import Notifier
from hetpeer.peer.top.top_screen import Top
from hetpeer.peer.top.top_text import lines
from hetpeer.peer.web.machine_load import MachineLoad

FIGURES = VolunteerStatus(
    pid=os.getpid(),
    run="tiny-llm",
    unit="tokens",
    steps=1000,
    step=250,
    loss=3.25,
    blocks=(2, 4),
    units_per_second=1940.0,
    microbatches=123,
    computes=0.75,
    lines=(LinkStatus(to="4bX8Qw", way="direct", bytes_per_second=2.5e6),),
)
LOAD = MachineLoad(
    cpu=0.5, own_cores=1.25, memory_used=3 << 30, memory_total=8 << 30, own_memory=1 << 30, disk_free=5 << 30
)
GPU = GpuLoad(name="Card 0", busy=0.87, memory_used=3 << 30, memory_total=12 << 30)


def test_what_is_shown() -> None:
    shown = {
        line[:11].strip(): line[11:]
        for line in lines(DaemonStatus(state="training", since=0.0, figures=FIGURES), LOAD, [GPU])
    }
    assert shown["state"].startswith("training since ")
    assert shown["run"] == "tiny-llm"
    assert shown["step"] == "250/1,000 (25%)  loss 3.2500"
    assert shown["you"] == "1,940 tokens/s, 75% of the time computing, 123 microbatches  blocks 2-3"
    assert shown["link"] == "→ …4bX8Qw  20.0 Mbit/s  direct"
    assert shown["processor"] == "50% of all cores busy; hetpeer uses 1.2 cores"
    assert shown["memory"] == "3 GiB of 8 GiB used; hetpeer uses 1 GiB"
    assert shown["disk"] == "5 GiB free"
    assert shown["gpu"] == "Card 0  87% busy, 3 GiB of 12 GiB used by all programs"


def test_what_is_not_known_is_left_out() -> None:
    (line,) = lines(DaemonStatus(state="paused", reason="user\x1b[2J", since=0.0, until=60.0), None)
    assert line.startswith("state      paused (user\\x1b[2J) since ")
    assert ", until " in line
    few = VolunteerStatus(pid=1, run="r", unit="samples", steps=5)
    assert [text.split()[0] for text in lines(DaemonStatus(state="waiting", since=0.0, figures=few), None)] == [
        *("state", "run", "step", "you")
    ]  # fmt: skip


def test_figures_travel_and_older_daemons_have_none() -> None:
    standing = DaemonStatus(state="training", since=1.5, figures=FIGURES)
    assert decode_answer(standing.encode()) == standing
    assert decode_answer(b'{"schema": "hetpeer.control/1", "state": "waiting", "since": 1.0}').figures is None


async def shows(pilot: Pilot[None], found: Callable[[str], bool]) -> None:
    """Return when the screen does; the test's own time limit is the deadline."""
    assert isinstance(pilot.app, Top)
    while not found(pilot.app.shown):
        await pilot.pause(0.05)


@pytest.mark.timeout(60)
async def test_the_screen_and_its_keys(tmp_path: Path) -> None:
    daemon = VolunteerDaemon(SystemClock(), asyncio.Event(), Notifier(""))
    daemon.does(DaemonState.TRAINING)
    app = Top(tmp_path)
    async with app.run_test() as pilot:
        async with daemon.running(), serving(tmp_path, daemon.answer):
            await shows(pilot, lambda text: "state      training" in text)
            assert "step" not in app.shown
            daemon.joined(tuple, lambda: FIGURES)
            await shows(pilot, lambda text: "loss 3.2500" in text and "processor" in text)
            await pilot.press("p")
            await shows(pilot, lambda text: "state      paused (user)" in text)
            assert daemon.standing.state == DaemonState.PAUSED
            await pilot.press("r")
            await shows(pilot, lambda text: "state      training" in text)
        await shows(pilot, lambda text: text.startswith("HP-CTL-001: "))
        await pilot.press("q")
    assert app.return_code == 0


def test_without_the_extra_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("hetpeer.peer.top")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.setitem(sys.modules, "textual.app", None)
    with pytest.raises(LocalError, match="HP-SYS-005") as caught:
        top(home=tmp_path)
    assert caught.value.exit_code == ExitCode.CONFIG


def test_nobody_to_watch(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="HP-CTL-001") as caught:
        top(home=tmp_path)
    assert caught.value.exit_code == ExitCode.NOT_RUNNING
