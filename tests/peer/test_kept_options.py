"""Limits and the name that an owner gave to `join` once: they hold until the owner changes them."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hetpeer.peer.cli.main import app
from hetpeer.peer.control.control_messages import DaemonStatus
from hetpeer.peer.control.owned_daemon import serving
from hetpeer.peer.limits.config_file import effective
from hetpeer.peer.limits.node_rates import told
from hetpeer.peer.process import lifecycle
from tests.peer.test_options import ADDRESS


@pytest.fixture
def join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`hetpeer join` whose owner ends it before it has dialled anybody."""
    monkeypatch.setenv("HETPEER_DASHBOARD", "off")

    def run_daemon(work: Callable[[asyncio.Event], Coroutine[Any, Any, Any]]) -> Any:
        leaving = asyncio.Event()
        leaving.set()
        return asyncio.run(work(leaving))

    monkeypatch.setattr(lifecycle, "run_daemon", run_daemon)

    def joined(*words: str) -> Result:
        arguments = ["join", "--home", str(tmp_path), "--bootstrap", ADDRESS, "--host", "127.0.0.1"]
        done = CliRunner().invoke(app, [*arguments, *words])
        assert done.exit_code == 0, (done.output, done.exception)
        return done

    return joined


def shown(home: Path) -> dict[str, dict[str, Any]]:
    """Value and source of each setting, as `hetpeer config show` has them."""
    done = CliRunner().invoke(app, ["config", "show", "--json", "--home", str(home)])
    settings: dict[str, dict[str, Any]] = json.loads(done.stdout)["settings"]
    return settings


def test_a_plain_join_has_the_limits_of_the_one_before(tmp_path: Path, join: Callable[..., Result]) -> None:
    path = tmp_path / "config.toml"
    first = join("--ram-limit", "2GiB", "--name", "grandma", "--hours", "22:00-07:00")
    line = f"kept in {path} for later starts: node.name grandma, limits.ram 2GiB, when.mode schedule, "
    assert f"{line}when.hours 22:00-07:00" in first.stderr
    assert tomllib.loads(path.read_text()) == {
        "limits": {"ram": "2GiB"},
        "node": {"name": "grandma"},
        "when": {"mode": "schedule", "hours": ["22:00-07:00"]},
    }
    second = join()
    assert f"in force by {path}: node.name grandma, limits.ram 2GiB, when.mode schedule" in second.stderr
    assert "kept in" not in second.stderr
    assert shown(tmp_path)["limits.ram"] == {"value": "2GiB", "source": str(path)}
    third = join("--ram-limit", "3GiB")
    assert f"kept in {path} for later starts: limits.ram 3GiB" in third.stderr
    assert effective(tmp_path, {}).settings.limits.ram == "3GiB"


def test_what_is_of_one_machine_or_one_call_is_not_kept(tmp_path: Path, join: Callable[..., Result]) -> None:
    """The address to listen on was given, and so was the environment's dashboard."""
    said = join()
    assert "kept" not in said.stderr
    assert not (tmp_path / "config.toml").exists()


def test_a_trial_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetpeer.peer.cli.volunteer import join_command

    monkeypatch.setattr(join_command, "run_loop", lambda trial: trial.close())
    words = ["join", "--home", str(tmp_path), "--bootstrap", ADDRESS, "--dry-run", "--up-limit", "2mbit"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert not (tmp_path / "config.toml").exists()


def test_a_file_that_cannot_be_changed_stays_and_the_limits_count_this_time(
    tmp_path: Path, join: Callable[..., Result]
) -> None:
    path = tmp_path / "config.toml"
    path.write_text("limits = { cpu = 1 }\n")
    said = join("--up-limit", "2mbit").stderr
    assert path.read_text() == "limits = { cpu = 1 }\n"
    assert "these options count for this time only: limits.up 2mbit" in said


async def test_of_a_running_daemon_that_is_shown_which_counts(tmp_path: Path) -> None:
    found = effective(tmp_path, {"limits.up": "5mbit", "when.hours": "22:00-07:00,12:00-13:00"})
    status = DaemonStatus(state="training", since=1.0, settings=told(found.settings, found.sources))
    async with serving(tmp_path, lambda _: status):
        settings = await asyncio.to_thread(shown, tmp_path)
    assert settings["limits.up"] == {"value": "5mbit", "source": "the command line"}
    assert settings["when.hours"]["value"] == ["22:00-07:00", "12:00-13:00"]
    assert settings["limits.down"] == {"value": "none", "source": "default"}
    assert shown(tmp_path)["limits.up"]["source"] == "default"
