"""What is said to a person who is gone."""

import os
import pty
import subprocess
import sys

import pytest

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.checkup.findings import Finding, Grade
from hetpeer.peer.cli import main
from hetpeer.peer.process import console

SAYS = """
import logging, sys
from hetpeer.peer.cli.options import configure_logging
from hetpeer.peer.process.console import say

configure_logging(0, quiet=False)
sys.stdin.readline()
for _ in range(3):
    say("nobody reads this")
    logging.getLogger("hetpeer.x").warning("nor this")
print("goes on")
"""


def test_nothing_that_peers_say_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    console.tell("finished: \x1b[2Jnothing happened\r\u202eever")
    assert capsys.readouterr().err == "finished: \\x1b[2Jnothing happened\\r\\u202eever\n"


def test_nor_does_what_is_wrong_with_what_they_have_signed() -> None:
    """A counter's name is the author's, and is said where its value cannot be."""
    error = LocalError(
        "HP-RUN-001", "counters.\x1b[1A\x1b[2Kok is wrong", why="\u202eno", fix="ask\nits author"
    )
    failed = Finding(check="run", grade=Grade.FAIL, error=error)
    well = Finding(check="run", grade=Grade.OK, text="\x1b[8m")
    for line in (error.line(), failed.line(), well.line()):
        assert line.isprintable()


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_ends_because_nobody_listens(terminal: bool) -> None:
    """Neither what it does nor its exit status; a pipe gives EPIPE, a terminal EIO."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", SAYS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        start_new_session=True,
    ) as saying:
        os.close(ours)
        os.close(theirs)
        printed, _ = saying.communicate("\n", timeout=60)
    assert (saying.returncode, printed) == (0, "goes on\n")


def test_what_went_wrong_has_its_exit_status_though_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**_: object) -> None:
        raise LocalError("HP-NET-002", "nobody answers", why="a test", fix="wait", exit_code=ExitCode.NETWORK)

    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        monkeypatch.setattr(main, "app", fail)
        with pytest.raises(SystemExit) as ended:
            main.run()
        assert ended.value.code == ExitCode.NETWORK
        console.tell("goes nowhere")
