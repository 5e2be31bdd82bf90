"""The command line's frame: how fast it answers, and how anything that goes wrong reaches its user."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.cli import main, options

COMMAND = [sys.executable, "-m", "hetpeer.peer.cli.main"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": ".", "NO_COLOR": "1"}


def hetpeer(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


@pytest.fixture
def run_app(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str]]:
    """Run a command body as `hetpeer` would; exit status and stderr."""

    def run(body: Callable[[], None], *arguments: str) -> tuple[object, str]:
        app = typer.Typer(pretty_exceptions_enable=False)
        app.callback()(main._global_options)
        app.command("body")(body)
        monkeypatch.setattr(main, "app", app)
        monkeypatch.setattr(sys, "argv", ["hetpeer", *arguments, "body"])
        with pytest.raises(SystemExit) as ended:
            main.run()
        return ended.value.code or 0, capsys.readouterr().err

    root = logging.getLogger()
    before = root.handlers, root.level
    yield run
    root.handlers, root.level = before
    logging.getLogger("hetpeer").setLevel(logging.NOTSET)
    logging.captureWarnings(capture=False)


@pytest.mark.parametrize(
    ("module", "status"), [("typer", -signal.SIGINT), ("hetpeer.peer.cli.author.invite_command", 130)]
)
def test_ctrl_c_while_modules_are_imported_shows_no_traceback(module: str, status: int) -> None:
    """The first is imported by the command line itself, the second when the command is known."""
    interrupts = f"""
import os, signal, sys
from hetpeer.peer.cli.entry import run


class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupts())
sys.argv = ["hetpeer", "invite", "there"]
run()
"""
    ended = subprocess.run(
        [sys.executable, "-c", interrupts], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", "")


SMALLEST = """
import sys
import typer
app = typer.Typer()
app.callback()(lambda: None)
@app.command("status")
def status(peer: str = ""): pass
sys.argv = ["smallest", "status", "--help"]
app()
"""
"""What anybody's command made with this library takes."""


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--help"]])
def test_help_answers_at_once(arguments: list[str]) -> None:
    """Processor time: the process never waits, so on an idle machine it is the time a user waits.

    Machines differ, and one differs with its neighbours, so it is compared with what the smallest such
    program takes, in turns.
    """
    ours, smallest = [], []
    for _ in range(3):
        for seconds, command in (
            (ours, [*COMMAND, *arguments]),
            (smallest, [sys.executable, "-c", SMALLEST]),
        ):
            begin = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=True, timeout=30)
            end = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime)
    assert min(ours) < 2 * min(smallest)


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], *([command, "--help"] for command in ("status", "demo", "inspect", "plan"))],
    ids=" ".join,
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from hetpeer.peer.cli import main
sys.argv = ["hetpeer", *{arguments!r}]
try:
    main.run()
finally:
    heavy = "torch numpy hivemind asyncio cryptography uvloop networkx"
    print(sorted(set(heavy.split()).intersection(sys.modules)), file=sys.stderr)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=30
    )
    assert result.stderr.strip() == "[]"


def test_every_command_is_mounted() -> None:
    text = hetpeer("--help").stdout
    for command in (
        "init",
        "audit",
        "export",
        "generate",
        "join",
        "pause",
        "stop",
        "service",
        "bootstrap",
        "invite",
        "dashboard",
        "doctor",
        "status",
        "demo",
    ):
        assert f" {command} " in text


def test_version() -> None:
    result = hetpeer("--version")
    assert (result.returncode, result.stdout.split()[0], result.stderr) == (0, "hetpeer", "")


def test_own_error_is_one_line_with_its_exit_code() -> None:
    result = hetpeer("audit", "/nonexistent")
    assert (result.returncode, result.stdout) == (ExitCode.CONFIG, "")
    assert result.stderr.startswith("HP-RUN-004: ")
    assert result.stderr.count("\n") == 1
    assert "; do: " in result.stderr


def test_traceback_only_with_vv() -> None:
    assert "Traceback" not in hetpeer("-v", "audit", "/nonexistent").stderr
    assert "Traceback" in hetpeer("-vv", "audit", "/nonexistent").stderr


@pytest.mark.parametrize(
    ("arguments", "what", "why"),
    [
        (["status", "--no-such-option"], "hetpeer status", "--no-such-option"),
        (["no-such-command"], "hetpeer", "'no-such-command'"),
        (["init"], "hetpeer init", "Missing argument 'DIR'"),
        (["config", "set", "limits.up"], "hetpeer config set", "Missing argument 'value'"),
        (["join", "--threads", "0"], "hetpeer join", "'--threads'"),
    ],
)
def test_usage_error_is_one_line_too(arguments: list[str], what: str, why: str) -> None:
    result = hetpeer(*arguments)
    assert (result.returncode, result.stdout) == (ExitCode.USAGE, "")
    assert result.stderr.startswith(f"HP-CLI-001: {what} cannot be run like this; why: ")
    assert why in result.stderr
    assert result.stderr.endswith(f"; do: {what} -h shows its arguments and options\n")
    assert result.stderr.count("\n") == 1


def test_a_group_of_commands_alone_shows_its_help() -> None:
    result = hetpeer("config")
    assert result.returncode == ExitCode.USAGE
    assert "Commands:\n  show " in result.stderr


def test_unexpected_error_is_one_line_too(run_app: Callable[..., tuple[object, str]]) -> None:
    def body() -> None:
        raise ValueError("first\nsecond")

    code, stderr = run_app(body)
    assert code == ExitCode.UNEXPECTED
    assert stderr == (
        "HP-SYS-000: unexpected ValueError: first second; why: this is probably a bug in hetpeer;"
        " do: run the command again with -vv and report its output\n"
    )


def test_error_inside_a_task_group(run_app: Callable[..., tuple[object, str]]) -> None:
    def body() -> None:
        inner = LocalError("HP-DISK-002", "no room", why="full", fix="empty it", exit_code=ExitCode.TOO_SMALL)
        raise ExceptionGroup("tasks", [ExceptionGroup("tasks", [inner])])

    assert run_app(body) == (ExitCode.TOO_SMALL, "HP-DISK-002: no room; why: full; do: empty it\n")


def test_interrupt(run_app: Callable[..., tuple[object, str]]) -> None:
    def body() -> None:
        raise KeyboardInterrupt

    assert run_app(body) == (ExitCode.INTERRUPTED, "")


def test_sigterm_cancels_the_loop(run_app: Callable[..., tuple[object, str]]) -> None:
    cleaned_up = []

    async def work() -> None:
        import asyncio
        import signal

        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(10)
        finally:
            cleaned_up.append(True)

    assert run_app(lambda: options.run_loop(work()))[0] == ExitCode.TERMINATED
    assert cleaned_up == [True]


def test_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--help"], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(30) == 1


@pytest.mark.parametrize(
    ("flags", "shown"),
    [(["-q"], "e"), ([], "we"), (["-v"], "iwe"), (["-vv"], "diwe")],
)
def test_verbosity(flags: list[str], shown: str, run_app: Callable[..., tuple[object, str]]) -> None:
    def body() -> None:
        log = logging.getLogger("hetpeer.anything")
        log.debug("d")
        log.info("i")
        log.warning("w")
        log.error("e")

    code, stderr = run_app(body, *flags)
    assert code == 0
    assert [line.split()[-1] for line in stderr.splitlines()] == list(shown)


def test_json_logs(run_app: Callable[..., tuple[object, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        try:
            json.loads("?")
        except ValueError:
            logging.getLogger("hetpeer.dht").exception("it %s", "broke")

    monkeypatch.setenv("LOG_FORMAT", "json")
    record = json.loads(run_app(body)[1])
    assert (record["level"], record["logger"], record["event"]) == ("error", "hetpeer.dht", "it broke")
    assert "JSONDecodeError" in record["traceback"]


def test_plain_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()
    with os.fdopen(leader, "rb"), os.fdopen(follower, "w") as terminal, Path(os.devnull).open("w") as file:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert not options.plain(terminal)
        assert options.plain(file)
        monkeypatch.setenv("TERM", "dumb")
        assert options.plain(terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")
        assert options.plain(terminal)


def test_a_line_of_the_help_is_the_first_of_its_command() -> None:
    root = typer.main.get_command(main.app)
    context = root.make_context("hetpeer", [], resilient_parsing=True)
    for name, (_, line) in main.COMMANDS.items():
        command = root.resolve_command(context, [name])[1]  # type: ignore[attr-defined]
        assert command.get_short_help_str(200) == line, name


def test_a_command_imports_no_other() -> None:
    code = """
import sys
from hetpeer.peer.cli import main
sys.argv = ["hetpeer", "join", "--help"]
try:
    main.run()
finally:
    loaded = (name.rpartition(".")[2] for name in sys.modules if name.endswith("_command"))
    print(sorted(loaded), file=sys.stderr)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=30
    )
    assert result.stderr.strip() == "['join_command']"


def test_completion_knows_commands_and_their_options() -> None:
    shell = {"_HETPEER_COMPLETE": "complete_bash"}
    named = hetpeer(COMP_WORDS="hetpeer jo", COMP_CWORD="1", **shell)
    assert named.stdout.split() == ["join"]
    options = hetpeer(COMP_WORDS="hetpeer join --dry", COMP_CWORD="2", **shell)
    assert options.stdout.split() == ["--dry-run"]
