"""The demo's parts by themselves, and a small demo from end to end with a volunteer that is killed."""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from rich.live import Live

from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay_result import Replay
from hetpeer.bootstrap.log.record_log import Log
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.demo.demo_report import report, summarise
from hetpeer.peer.demo.demo_run import STALL_S, LogFeed, Seen, Trained, _Watch, recovery_seconds
from hetpeer.peer.demo.demo_settings import MARKER, DemoSettings, claimed, example_model
from hetpeer.peer.demo.demo_settings import make_run as make_demo_run
from hetpeer.peer.demo.demo_view import LiveView, Picture, PlainView
from hetpeer.peer.process.hetpeer_children import Child, end_all
from tests.amounts import mostly_proof
from tests.bootstrap.engine import Engine, make_run

PICTURE = Picture(
    step=3,
    steps=60,
    loss=4.25,
    eval_loss=5.5,
    tokens_per_second=1234.5,
    rollbacks=0,
    volunteers={"volunteer-1": "alive", "volunteer-2": "killed"},
)

# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wrong", [{"peers": 0}, {"steps": 0}, {"kill": 4}, {"kill": -1}, {"steps": 1}])
def test_impossible_demos_are_refused(wrong: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(LocalError) as caught:
        DemoSettings(out=tmp_path, **wrong)
    assert (caught.value.code, caught.value.exit_code) == ("HP-DEMO-001", ExitCode.USAGE)


def test_a_demo_is_of_text(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="trains on text") as caught:
        make_demo_run(DemoSettings(out=tmp_path, data=(Path("digits.py:data"),)), print)
    assert (caught.value.code, caught.value.exit_code) == ("HP-DEMO-005", ExitCode.USAGE)


def test_kills_are_spread_over_the_run(tmp_path: Path) -> None:
    assert DemoSettings(out=tmp_path).kill_steps == (30,)
    assert DemoSettings(out=tmp_path, kill=0).kill_steps == ()
    assert DemoSettings(out=tmp_path, kill=3).kill_steps == (15, 30, 45)


def test_example_model_is_found() -> None:
    path, _, function = example_model().rpartition(":")
    assert (Path(path).name, function) == ("gpt.py", "build")
    assert "def build(" in Path(path).read_text()


WITHOUT_EXAMPLES = """
from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.demo.demo_settings import example_model
try:
    example_model()
except LocalError as error:
    print(error.line())
"""


def test_an_installation_without_the_example_says_so(tmp_path: Path) -> None:
    """Packages and no examples; without site, so that the environment's own hetpeer is out of sight."""
    (tmp_path / "hetpeer" / "examples").mkdir(parents=True)
    for name in ("__init__.py", "dht", "peer"):
        (tmp_path / "hetpeer" / name).symlink_to(Path(__file__).parents[2] / "hetpeer" / name)
    said = subprocess.run(
        [sys.executable, "-S", "-c", WITHOUT_EXAMPLES],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert said.stdout.startswith("HP-DEMO-002: the example model is not installed; why: "), said.stderr


def test_folder_is_claimed_and_an_earlier_demo_replaced(tmp_path: Path) -> None:
    settings = DemoSettings(out=tmp_path / "a" / "out")
    with claimed(settings):
        (settings.out / "run").mkdir()
        (settings.out / "old.txt").write_text("old")
    with claimed(settings):
        assert sorted(path.name for path in settings.out.iterdir()) == [MARKER, "logs"]


def test_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with (
        pytest.raises(LocalError, match="exists and is not empty") as caught,
        claimed(DemoSettings(out=tmp_path)),
    ):
        pass
    assert caught.value.code == "HP-DISK-003"
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_running_demo_is_left_alone(tmp_path: Path) -> None:
    settings = DemoSettings(out=tmp_path)
    with (tmp_path / MARKER).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (tmp_path / "run").mkdir()
        with pytest.raises(LocalError, match="another demo") as caught, claimed(settings):
            pass
    assert caught.value.code == "HP-DEMO-006"
    assert (tmp_path / "run").exists()


# ── feed ────────────────────────────────────────────────────────────────────────────────────────────────────


class HandClock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def commit(step: int, seconds: float = 1.0) -> dict[str, object]:
    return {"kind": "commit", "step": step, "loss": 5.0 - step, "seconds": seconds}


def test_feed_follows_a_growing_log(tmp_path: Path) -> None:
    clock = HandClock()
    feed = LogFeed(tmp_path / "ledger.log", clock)
    assert feed.poll() == ()
    log = Log.open(tmp_path / "ledger.log")
    log.append(commit(0, 4.0))
    clock.now = 7.0
    assert [seen.at for seen in feed.poll()] == [7.0]
    assert feed.poll() == ()
    log.append(commit(1, 2.0))
    log.append(commit(2, 2.0))
    log.append({"kind": "rollback", "view": 1, "to_version": 1})
    clock.now = 8.0
    assert [seen.record["kind"] for seen in feed.poll()] == ["commit", "commit", "rollback"]
    log.close()
    assert (feed.history.version, feed.history.rollbacks, len(feed.seen)) == (1, 1, 4)
    assert (feed.step_seconds(), feed.step_seconds(3), feed.step_seconds(1)) == (2.0, 2.0, 2.0)


def at(moment: float, record: dict[str, object]) -> Seen:
    return Seen(at=moment, record=record)


def test_recovery_is_measured_to_the_first_step_begun_after_the_kill() -> None:
    before = [at(1.0, commit(0)), at(2.0, commit(1)), at(2.0, {"kind": "evaluation", "step": 1, "loss": 1.0})]
    interrupted = [*before, at(5.5, commit(2)), at(6.5, commit(3))]
    assert recovery_seconds(interrupted, killed_at=2.5) == 6.5 - 2.5 - 1.0
    unharmed = [*before, at(3.0, commit(2)), at(4.0, commit(3))]
    assert recovery_seconds(unharmed, killed_at=2.5) == 0.5
    rolled_back = [*before, at(9.0, {"kind": "rollback", "view": 1, "to_version": 0}), at(12.0, commit(0))]
    assert recovery_seconds(rolled_back, killed_at=2.5) == 12.0 - 2.5 - 1.0
    assert recovery_seconds(interrupted[:4], killed_at=2.5) is None


# ── view ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_plain_view_prints_each_step_once(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView()
    view.show(PICTURE)
    view.show(PICTURE)
    view.say("killed volunteer-2")
    assert capsys.readouterr().err.splitlines() == [
        "step 3/60  loss 4.2500  held-out 5.5000  1,234 tok/s  1 alive",
        "killed volunteer-2",
    ]
    quiet = PlainView(quiet=True)
    quiet.show(PICTURE)
    quiet.say("anything")
    assert capsys.readouterr().err == ""


def test_live_view_draws_the_volunteers() -> None:
    output = StringIO()
    with Live(console=Console(file=output, force_terminal=True, width=100), auto_refresh=False) as live:
        view = LiveView(live)
        view.say("a [line] that stays")
        view.show(PICTURE)
    assert "a [line] that stays" in output.getvalue()
    assert "● volunteer-2 killed" in output.getvalue()
    assert "step 3/60" in output.getvalue()


# ── children ────────────────────────────────────────────────────────────────────────────────────────────────


async def child(tmp_path: Path, code: str) -> Child:
    command = (sys.executable, "-c", code)
    return await Child.start("child", (), home=tmp_path, log=tmp_path / "child.log", command=command)


async def test_child_that_fails_says_why(tmp_path: Path) -> None:
    failing = await child(tmp_path, "import sys; print('HP-X-001: broken', file=sys.stderr); sys.exit(3)")
    with pytest.raises(LocalError, match="status 3; its last line: HP-X-001: broken") as caught:
        await failing.next_line(30)
    assert caught.value.code == "HP-DEMO-003"


async def test_child_that_stays_silent_is_given_up(tmp_path: Path) -> None:
    silent = await child(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(LocalError, match="not ready"):
        await silent.next_line(0.2)
    await end_all([silent])
    assert silent.status == -signal.SIGTERM


async def test_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"{deaf}; print('up', flush=True); time.sleep(60)"
    stubborn = await child(tmp_path, code)
    assert await stubborn.next_line(30) == "up"
    await stubborn.end(0.3)
    assert stubborn.status == -signal.SIGKILL


def test_no_child_outlives_a_killed_demo(tmp_path: Path) -> None:
    """A process starts a child as the demo does, with the product's loop, and is killed with -9."""
    code = f"""
import asyncio, sys, uvloop
from pathlib import Path
from hetpeer.peer.process.hetpeer_children import Child

async def main():
    sleeper = (sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    folder = Path({str(tmp_path)!r})
    child = await Child.start("child", (), home=folder, log=folder / "log", command=sleeper)
    print(await child.next_line(30), flush=True)
    await asyncio.sleep(60)

uvloop.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}
    ) as parent:
        assert parent.stdout is not None
        orphan = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    assert is_gone_within(orphan, 10)


def is_gone_within(pidfd: int, seconds: float) -> bool:
    try:
        return bool(select.select([pidfd], [], [], seconds)[0])
    finally:
        os.close(pidfd)


# ── report ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_report_proves_and_writes_everything(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    Engine(run, [Identity.create(tmp_path / name) for name in ("a", "b")]).train()
    settings = DemoSettings(out=tmp_path, steps=4, peers=2, kill=0)
    feed = LogFeed(run.log_path, SystemClock())
    feed.poll()
    feed.seen = [Seen(at=float(second), record=seen.record) for second, seen in enumerate(feed.seen)]
    summary = report(settings, run, Trained(feed=feed, kills=()), PlainView())
    document = json.loads((tmp_path / "summary.json").read_text())
    assert document["ok"], document["problems"]
    assert (document["steps"], document["peers"], document["killed"]) == (4, 2, 0)
    assert (document["microbatches_expected"], document["microbatches_counted"]) == (16, 16)
    assert (document["microbatches_lost"], document["microbatches_duplicated"]) == (0, 0)
    assert (document["equal_steps"], document["near_steps"]) == (0, 4)  # the trainer is not a worker
    assert document["recovery_seconds"] is None
    for name in ("checkpoint", "export", "plot", "sample"):
        assert (tmp_path / document[name]).exists()
    assert list(summary.lines(tmp_path))[-1].split(maxsplit=1) == ["verdict", "exactly once"]

    longer = DemoSettings(out=tmp_path, steps=5, peers=2, kill=0)
    paths = {name: document[name] for name in ("checkpoint", "export", "plot", "sample")}
    trained, compared = Trained(feed=feed, kills=()), Replay(steps=4)
    summary = summarise(longer, trained, audit(run.path), compared, paths)
    assert not summary.ok
    assert "only 4 of 5 steps were committed" in summary.problems


# ── all of it ───────────────────────────────────────────────────────────────────────────────────────────────

TINY = """
from hetpeer_example import build as build_gpt

def build():
    return build_gpt(width=32, layers=2, heads=2)
"""


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    example = Path(example_model().rpartition(":")[0])
    (tmp_path / "hetpeer_example.py").write_text(example.read_text())
    (tmp_path / "tiny.py").write_text(TINY)
    return f"{tmp_path / 'tiny.py'}:build"


def demo_process(out: Path, model: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hetpeer.peer.cli.main", "demo", "--out", str(out), "--model", model]
    return subprocess.Popen(
        [*command, *arguments],
        env={**os.environ, "PYTHONPATH": "."},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - what a shell starts with & ignores Ctrl-C
    )


@pytest.mark.swarm
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kill", mostly_proof([0, 1], [1]))
def test_a_demo(tmp_path: Path, tiny_model: str, kill: int) -> None:
    options = ("--peers", f"{1 + kill}", "--steps", "8", "--kill", f"{kill}")
    with demo_process(tmp_path / "out", tiny_model, *options) as process:
        stdout, stderr = process.communicate(timeout=220)
    assert process.returncode == 0, stderr
    assert ("(kill -9) after" in stderr) == bool(kill)
    assert stdout.splitlines()[-1].split(maxsplit=1) == ["verdict", "exactly once"]
    document = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (document["steps"], document["killed"]) == (8, kill)
    assert document["microbatches_counted"] == 8 * 8
    assert document["recovery_seconds"] >= 0 if kill else document["recovery_seconds"] is None


def having_torch(pid: int) -> set[str]:
    """What the processes below `pid` that have loaded torch are."""
    found = set()
    for process in psutil.Process(pid).children(recursive=True):
        if any("libtorch" in file.path for file in process.memory_maps()):
            line = " ".join(process.cmdline())
            found.add("worker_main" if "worker_main" in line else line)
    return found


@pytest.mark.proof
@pytest.mark.swarm
@pytest.mark.timeout(240)
def test_ctrl_c_ends_everybody(tmp_path: Path, tiny_model: str) -> None:
    with demo_process(
        tmp_path / "out", tiny_model, "--peers", "1", "--kill", "0", "--steps", "100000"
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 1/"):
                break
        assert having_torch(process.pid) == {"worker_main"}, "no daemon needs it"
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
        assert time.monotonic() - begin < 50  # the goal is 5 s, where nothing else runs
    assert process.returncode == ExitCode.INTERRUPTED
    until = time.monotonic() + 30.0
    while leftovers := subprocess.run(
        ["pgrep", "-f", str(tmp_path)], stdout=subprocess.PIPE, check=False
    ).stdout:
        assert time.monotonic() < until, leftovers


async def test_a_demo_in_which_nothing_moves_is_given_up(tmp_path: Path) -> None:
    settings, clock = DemoSettings(out=tmp_path, peers=1, kill=0), HandClock()
    settings.logs.mkdir()
    run = make_run(tmp_path / "author")
    still = [await child(tmp_path, "import time; time.sleep(60)") for _ in range(2)]
    watch = _Watch(settings, run, PlainView(quiet=True), clock, still[0], still[1:])
    clock.now += STALL_S + 1
    try:
        with pytest.raises(LocalError) as caught:
            await watch.until_finished()
    finally:
        await end_all(still)
    assert caught.value.line().startswith(f"HP-DEMO-004: no step was committed for {STALL_S:.0f} s; why: ")
