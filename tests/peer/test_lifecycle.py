"""A daemon that is interrupted while it starts, and a machine that sleeps, by given clocks."""

import asyncio
import subprocess
import sys

import pytest

from hetpeer.dht.base.errors import ExitCode
from hetpeer.peer.process import lifecycle
from hetpeer.peer.process.lifecycle import Sleep, unless, watch_sleep

SIGNALLED = """
import asyncio, os, signal
from hetpeer.peer.process.lifecycle import run_daemon

async def main(leaving):
    leaving.set()  # its owner wants so
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        print("lives", flush=True)

run_daemon(main)
"""


def test_only_the_second_signal_ends_it_at_once() -> None:
    """Who leaves already is not killed by systemd's first word."""
    ended = subprocess.run(
        [sys.executable, "-c", SIGNALLED], stdout=subprocess.PIPE, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (ExitCode.TERMINATED, "lives\n")


HUNG_UP = """
import asyncio, os, signal
from hetpeer.peer.process.lifecycle import run_daemon

async def main(leaving):
    for name in {names}:
        os.kill(os.getpid(), getattr(signal, name))
        await asyncio.sleep(0.1)
        print(name, leaving.is_set(), flush=True)

signal.signal(signal.SIGHUP, signal.{before})
run_daemon(main)
"""


@pytest.mark.parametrize(
    ("names", "before", "status", "said"),
    [
        (["SIGHUP", "SIGHUP"], "SIG_DFL", 0, ["SIGHUP True", "SIGHUP True"]),
        (["SIGTERM", "SIGHUP"], "SIG_DFL", 0, ["SIGTERM True", "SIGHUP True"]),  # systemd, of a session
        (["SIGHUP", "SIGTERM"], "SIG_DFL", 0, ["SIGHUP True", "SIGTERM True"]),
        (["SIGHUP", "SIGTERM"], "SIG_IGN", 0, ["SIGHUP False", "SIGTERM True"]),  # nohup
    ],
)
def test_a_terminal_that_goes_away_asks_it_to_leave(
    names: list[str], before: str, status: int, said: list[str]
) -> None:
    code = HUNG_UP.format(names=names, before=before)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout.splitlines()) == (status, said)
    asked = names[0] == "SIGHUP" and before == "SIG_DFL"
    assert ended.stderr.count("SIGHUP: its terminal has ended") == asked


FEW_FILES = """
import resource
from hetpeer.peer.process.lifecycle import run_daemon

async def main(leaving):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))

for soft, hard in ((300, 800), (200, 800)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    run_daemon(main)
"""


def test_a_daemon_may_have_as_many_files_open_as_its_user_lets_it() -> None:
    """1,024, the usual limit of a process, is soon reached by connections."""
    ended = subprocess.run(
        [sys.executable, "-c", FEW_FILES], stdout=subprocess.PIPE, text=True, check=False, timeout=60
    )
    assert ended.stdout == "800 800\n800 800\n"


async def test_work_that_is_done_counts() -> None:
    async def work() -> int:
        return 7

    assert await unless(asyncio.Event().wait(), work()) == 7


async def test_leaving_cancels_and_waits_for_the_end() -> None:
    leaving, ended = asyncio.Event(), []

    async def work() -> int:
        try:
            leaving.set()
            await asyncio.Event().wait()
            return 1
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    assert await asyncio.wait_for(unless(leaving.wait(), work()), 5) is None
    assert ended == ["cleaned up"]


async def test_an_error_is_the_works_own() -> None:
    async def work() -> int:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await unless(asyncio.Event().wait(), work())


def test_time_that_passes_is_no_sleep() -> None:
    sleep = Sleep(100.0, 5000.0)
    assert sleep.look(101.0, 5001.0) == 0.0
    assert sleep.look(4000.0, 8900.0) == 0.0  # our process stood still, the machine did not


def test_each_sleep_counts_once() -> None:
    sleep = Sleep(100.0, 5000.0)
    assert sleep.look(101.0, 8601.0) == 3600.0
    assert sleep.look(102.0, 8602.0) == 0.0
    assert sleep.look(103.0, 8610.0) == 7.0


def test_clocks_that_are_read_one_after_the_other_give_no_negative_sleep() -> None:
    sleep = Sleep(100.0, 5000.0)
    assert sleep.look(101.00001, 5001.0) == 0.0


class Clock:
    """The boot clock jumps by what is left of `jumps` at each look; the other one stands still."""

    def __init__(self, *jumps: float) -> None:
        self.jumps = [0.0, *jumps]
        self.now = 0.0

    def monotonic(self) -> float:
        return 0.0

    def boottime(self) -> float:
        self.now += self.jumps.pop(0) if self.jumps else 0.0
        return self.now


async def test_only_who_slept_long_comes_back_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "SLEEP_LOOK_S", 0.0)
    clock, woken = Clock(0.0, 9.0, 0.0, 10.0, 3600.0), []
    both = asyncio.Event()

    async def wake() -> None:
        woken.append(clock.now)
        if len(woken) == 2:
            both.set()

    watching = asyncio.ensure_future(watch_sleep(clock, wake))
    await asyncio.wait_for(both.wait(), 5.0)
    watching.cancel()
    assert woken == [19.0, 3619.0]
