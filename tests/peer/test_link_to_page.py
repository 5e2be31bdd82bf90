"""How the owner of a volunteer comes to its page, whatever became of the line that said where it is."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from hetpeer.dht.base.errors import LocalError, RemoteError
from hetpeer.peer.cli.swarm import dashboard_command
from hetpeer.peer.cli.swarm.status_command import _show_own
from hetpeer.peer.cli.swarm.status_text import Here
from hetpeer.peer.cli.volunteer import service_command
from hetpeer.peer.control.control_messages import ControlRequest, DaemonStatus, decode_answer
from hetpeer.peer.control.owned_daemon import serving
from hetpeer.peer.daemon import systemd_units
from hetpeer.peer.limits.web_address import Where
from hetpeer.peer.web.daemon_web import _served
from hetpeer.peer.web.machine_load import LoadMeter
from hetpeer.peer.web.page_view import PageView
from hetpeer.peer.web.request_guard import token_of

LINK = "http://127.0.0.1:8787/#token=s3cr3t"
SHOWN = DaemonStatus(state="training", since=1.0, dashboard=LINK)


async def asked(home: Path, standing: DaemonStatus, app: Any, *arguments: str) -> Result:
    """What a command says beside a daemon of this standing."""

    def answer(_request: ControlRequest) -> DaemonStatus:
        return standing

    async with serving(home, answer):
        return await asyncio.to_thread(CliRunner().invoke, app, arguments)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.delenv("HETPEER_DASHBOARD", raising=False)
    alone = typer.Typer()
    alone.command()(dashboard_command.dashboard)
    return alone


async def test_the_command_prints_it(tmp_path: Path, command: typer.Typer) -> None:
    said = await asked(tmp_path, SHOWN, command, "--home", str(tmp_path))
    assert (said.exit_code, said.stdout) == (0, f"{LINK}\n")


@pytest.mark.parametrize("where", ["off", "0.0.0.0:8787"])
async def test_where_volunteers_serve_theirs_is_no_wish_for_another(
    tmp_path: Path, command: typer.Typer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("HETPEER_DASHBOARD", where)
    said = await asked(tmp_path, SHOWN, command, "--home", str(tmp_path))
    assert (said.exit_code, said.stdout) == (0, f"{LINK}\n")


@pytest.mark.parametrize("more", [[], ["--dashboard", "0"], ["--bootstrap", "nowhere"]])
async def test_who_asks_for_another_page_or_has_none_watches(
    tmp_path: Path, command: typer.Typer, more: list[str]
) -> None:
    """Here it does not come to that: nobody says of which run."""
    standing = SHOWN if more else SHOWN.model_copy(update={"dashboard": None})
    said = await asked(tmp_path, standing, command, "--home", str(tmp_path), *more)
    assert isinstance(said.exception, LocalError)
    assert said.exception.code.startswith("HP-ADDR-")
    assert LINK not in said.output


async def test_that_of_a_service_wherever_its_home_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / 'a "home" at 50% $x \\n'
    home.mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(systemd_units, "_systemctl", lambda *_: "ActiveState=active\nSubState=running\n")
    systemd_units.install(["hetpeer", "join", "--home", str(home), "--name", "--home"])
    assert systemd_units.home() == home
    said = await asked(home, SHOWN, service_command.commands, "status")
    assert said.exit_code == 0, said.output
    assert said.stdout.splitlines()[-1] == f"dashboard at {LINK}"


def test_the_status_says_it_to_people_only(capsys: pytest.CaptureFixture[str]) -> None:
    _show_own(Here(SHOWN), as_json=False)
    assert capsys.readouterr().out.splitlines()[1:] == [f"dashboard {LINK}"]
    _show_own(Here(SHOWN), as_json=True)
    assert "token" not in capsys.readouterr().out


def test_a_pause_is_explained_there(capsys: pytest.CaptureFixture[str]) -> None:
    _show_own(
        Here(DaemonStatus(state="paused", reason="user", why="you asked for it", since=1.0)), as_json=False
    )
    here, why = capsys.readouterr().out.splitlines()
    assert here.startswith("here      paused (user) since ")
    assert why == "why       you asked for it"


def test_it_travels() -> None:
    assert decode_answer(SHOWN.encode()) == SHOWN
    assert decode_answer(b'{"state": "training", "since": 1.0}').dashboard is None, "of a daemon before this"


@pytest.mark.parametrize("notified", ["", "/run/user/1000/notify"])
async def test_no_token_in_a_journal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    notified: str,
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", notified)

    async def status(*, ranked: bool) -> None:
        raise RemoteError("HP-NET-012", "nobody answers", why="a test", fix="wait")

    onlooker: Any = SimpleNamespace(status=status)
    view = PageView(onlooker, LoadMeter(tmp_path), lambda: None)
    async with _served(Where("127.0.0.1", 0), tmp_path, view, {}, None, "ask so and so") as (link, _):
        url, _, token = link.partition("/#token=")
        assert token == token_of(tmp_path)
    said = capsys.readouterr().err
    assert said == (f"dashboard at {url}/; ask so and so\n" if notified else f"dashboard at {link}\n")
