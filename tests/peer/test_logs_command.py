"""A daemon's log: what gets into it, its bounds, and reading it while it is written and when nobody writes
any more.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.cli import options
from hetpeer.peer.process import console, log_files
from hetpeer.peer.process.console import is_quiet, say
from hetpeer.peer.process.log_files import FILE, LogLine, LogReader, keeping_log

COMMAND = [sys.executable, "-m", "hetpeer.peer.cli.main"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": ".", "NO_COLOR": "1"}
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
REFUSED = "the peer to join by cannot be reached"
log = logging.getLogger("hetpeer.dht.anything")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    names = ("hetpeer", "hetpeer.peer.process.console", "py.warnings")
    root = logging.getLogger()
    before = root.handlers[:], root.level, [logging.getLogger(name).level for name in names]
    yield
    root.handlers[:], root.level = before[:2]
    for name, level in zip(names, before[2], strict=True):
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(capture=False)


def kept(home: Path) -> list[LogLine]:
    with closing(LogReader(home)) as reader:
        return reader.last(1000)


def test_all_of_it_gets_there_whatever_the_terminal_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options.configure_logging(0, quiet=True)
    with keeping_log(tmp_path):
        log.debug("too much")
        log.info("something")
        log.warning("a %s", "warning")
        say("dashboard at http://127.0.0.1:8787/#token=s3cr3t")
        logging.getLogger("others").warning("theirs")
    log.info("after it")
    assert is_quiet()
    assert capsys.readouterr().err == ""
    assert [(entry.level, entry.event) for entry in kept(tmp_path)] == [
        ("info", "something"),
        ("warning", "a warning"),
        ("info", "dashboard at http://127.0.0.1:8787/#token=…"),
    ]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_the_terminal_shows_what_it_did_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options.configure_logging(0, quiet=False)
    with keeping_log(tmp_path):
        log.info("for the file")
        log.warning("for both")
        say("said")
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(maxsplit=1)[-1] for line in shown] == ["warning for both", "said"]


def test_nothing_of_a_peers_words_moves_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options.configure_logging(0, quiet=False)
    nasty = "name \x1b[2J\r\n\u202eevil \ud800 né"
    with keeping_log(tmp_path):
        log.warning("%s", nasty)
    assert (tmp_path / FILE).read_bytes().isascii()
    assert (tmp_path / FILE).read_bytes().count(b"\n") == 1
    (entry,) = kept(tmp_path)
    (line,) = entry.lines(colours=False)
    assert line.endswith(" warning name \\x1b[2J\\r\\n\\u202eevil \\ud800 né")
    assert "\\x1b[2J\\r\\n" in capsys.readouterr().err
    assert console.log_line(0, "error", "red", colours=True).count("\x1b[") == 2
    failed = ValueError(nasty)
    record = logging.LogRecord("x", logging.ERROR, "", 0, "it", (), (ValueError, failed, None))
    assert not {*"\x1b\r\u202e"} & {*console.PlainFormatter(colours=False).format(record)}


def test_what_ended_it_is_the_last_that_is_said(tmp_path: Path) -> None:
    full = LocalError("HP-DISK-002", "no room", why="full", fix="empty it")
    with pytest.raises(LocalError), keeping_log(tmp_path):
        raise full
    with pytest.raises(ZeroDivisionError), keeping_log(tmp_path):
        print(1 / 0)
    first, second = kept(tmp_path)
    assert (first.level, first.event) == ("error", full.line())
    assert "ZeroDivisionError" in second.traceback
    assert list(second.lines(colours=False))[-1] == "    ZeroDivisionError: division by zero"


def test_its_size_is_bounded_and_its_files_are_read_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "MAX_BYTES", 1000)
    with keeping_log(tmp_path):
        log.info("first")
        with closing(LogReader(tmp_path)) as reader:
            seen = reader.last(1)
            for number in range(60):
                log.info("message %d", number)
                if number % 3 == 0:
                    seen += reader.news()
            seen += reader.news()
        log.info("%s", "x" * 10_000)
    assert [entry.event for entry in seen] == ["first", *(f"message {number}" for number in range(60))]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [FILE, *(f"{FILE}.{number}" for number in range(1, log_files.OLDER + 1))]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3 * 1000 + console.MAX_EVENT + 200
    with closing(LogReader(tmp_path)) as reader:
        assert [len(entry.event) for entry in reader.last(1)] == [console.MAX_EVENT]
        assert reader.news() == []
    with closing(LogReader(tmp_path)) as reader:
        assert [entry.event for entry in reader.last(13)][:12] == [f"message {n}" for n in range(48, 60)]
    with closing(LogReader(tmp_path)) as reader:
        assert reader.last(0) == []


def test_what_a_power_cut_left_is_passed_over(tmp_path: Path) -> None:
    with keeping_log(tmp_path):
        log.info("whole")
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"time": 1, "lev\n\0\0\0\n[1]\n{"time": 1e999, "level": "info", "event": "late"}\nhalf')
    assert [entry.event for entry in kept(tmp_path)] == ["whole"]


def test_a_full_disk_ends_the_log_and_not_the_daemon(tmp_path: Path) -> None:
    code = f"""
import logging, pathlib, resource
from hetpeer.peer.process.log_files import keeping_log
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
with keeping_log(pathlib.Path({str(tmp_path)!r})):
    for number in range(9):
        logging.getLogger("hetpeer.x").info("message %d", number)
print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "alive\n"
    assert done.stderr.count("is not whole: ") == 1
    assert "Traceback" not in done.stderr


def logs(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "logs", "--home", str(home), *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60)


def test_the_command(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="HP-CTL-004"):
        LogReader(tmp_path)
    none = logs(tmp_path)
    assert (none.returncode, none.stdout, none.stderr[:12]) == (ExitCode.NOT_RUNNING, "", "HP-CTL-004: ")
    with keeping_log(tmp_path):
        for number in range(4):
            log.info("message %d", number)
    shown = logs(tmp_path, "-n", "2").stdout.splitlines()
    assert [line.split()[2:] for line in shown] == [["info", "message", "2"], ["info", "message", "3"]]
    assert [json.loads(line)["event"] for line in logs(tmp_path, "--json").stdout.splitlines()] == [
        f"message {number}" for number in range(4)
    ]


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone afterwards, also where the test fails."""
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """Started in the background of a shell we ignore SIGINT, and what we start would, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
def test_following(tmp_path: Path) -> None:
    with keeping_log(tmp_path):
        log.info("before")
        with started([*COMMAND, "logs", "-f", "--home", str(tmp_path)]) as following:
            assert following.stdout is not None
            assert following.stdout.readline().endswith("info before\n")
            log.info("meanwhile")
            assert following.stdout.readline().endswith("info meanwhile\n")
            following.send_signal(signal.SIGINT)
            assert following.wait(100) == ExitCode.INTERRUPTED


def await_refusals(daemon: subprocess.Popen[str], home: Path, count: int) -> None:
    """Return when its log says so often that nobody is there."""
    deadline = time.monotonic() + 150
    while not (home / FILE).exists() or sum(REFUSED in entry.event for entry in kept(home)) < count:
        assert daemon.poll() is None, "it has ended"
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.swarm
def test_a_daemon_keeps_one(tmp_path: Path) -> None:
    """One that finds nobody: it says so, and leaves when it is told to."""
    command = [*COMMAND, "-q", "join", "--bootstrap", NOBODY, "--home", str(tmp_path)]
    with started(command) as daemon:
        await_refusals(daemon, tmp_path, 1)  # not the first thing: of sensors it may say something before
        daemon.send_signal(signal.SIGTERM)
        _, shown = daemon.communicate(timeout=100)
    assert shown == "left the run\n"


@pytest.mark.swarm
def test_it_goes_on_when_its_terminal_is_gone_and_leaves_in_good_order_when_that_says_so(
    tmp_path: Path,
) -> None:
    heeding = ["env", "--default-signal=HUP"]  # the tests may have been started with nohup
    command = [*heeding, *COMMAND, "join", "--bootstrap", NOBODY, "--home", str(tmp_path)]
    with started(command) as daemon:
        assert daemon.stderr is not None
        assert REFUSED in daemon.stderr.readline()
        daemon.stderr.close()
        await_refusals(daemon, tmp_path, 2)
        for _ in range(2):  # by the kernel and by the shell
            daemon.send_signal(signal.SIGHUP)
        assert daemon.wait(100) == ExitCode.OK
    assert sum("SIGHUP: its terminal has ended" in entry.event for entry in kept(tmp_path)) == 1
