"""A volunteer's settings: which source counts, what is refused and how, and a file of which one line
changes.
"""

import asyncio
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.cli.main import app
from hetpeer.peer.control.control_messages import ControlRequest, DaemonStatus
from hetpeer.peer.control.owned_daemon import serving
from hetpeer.peer.limits.config_file import config_path, edited, effective, read, write
from hetpeer.peer.limits.setting_layers import SettingsLayer, changed, merged, of_environment
from hetpeer.peer.limits.settings import AT_START, KEYS, WITH_WORKER, Settings

FILE = """\
# mine
[limits]
up = "5mbit"  # the neighbours complain
cpu = 2

[when]
hours = [ "22:00-07:00" ]
"""


def refused(*layers: SettingsLayer) -> LocalError:
    with pytest.raises(LocalError) as caught:
        merged(layers)
    assert (caught.value.code, caught.value.exit_code) == ("HP-CONF-003", ExitCode.CONFIG)
    return caught.value


def test_every_setting_has_a_default_and_a_row_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in page] == []
    assert {*WITH_WORKER, *AT_START} < set(KEYS)
    assert merged([]).settings == Settings()
    assert (Settings().threads, merged([SettingsLayer("", {"limits.cpu": 3})]).settings.threads) == (1, 3)


def test_option_beats_environment_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text('[limits]\nup = "1mbit"\ndown = "1mbit"\nram = "10%"\n')
    monkeypatch.setenv("HETPEER_LIMITS_UP", "2mbit")
    monkeypatch.setenv("HETPEER_LIMITS_DOWN", "2mbit")
    monkeypatch.setenv("HETPEER_WHEN_HOURS", "22:00-07:00, 12:00-13:00")
    monkeypatch.setenv("HETPEER_WHEN_YIELD_TO_GAMES", "off")
    found = effective(tmp_path, {"limits.up": "3mbit"})
    limits = found.settings.limits
    assert (limits.up, limits.down, limits.ram, limits.disk) == ("3mbit", "2mbit", "10%", "10%")
    assert found.settings.when.hours == ("22:00-07:00", "12:00-13:00")
    assert not found.settings.when.yield_to_games
    assert found.sources["limits.up"] == "the command line"
    assert found.sources["limits.down"] == "the environment's HETPEER_LIMITS_DOWN"
    assert found.sources["limits.ram"] == str(tmp_path / "config.toml")
    assert "limits.disk" not in found.sources


def test_other_variables_are_somebody_elses() -> None:
    others = {
        "HETPEER_HOME": "/",
        "HETPEER_FAIL": "x",
        "HETPEER_SANDBOX": "off",
        "HETPEER_REQUIRE_BROWSER": "1",
        "LIMITS_UP": "x",
        "HOME": "/",
        "NODE_NAME": "x",
    }
    assert of_environment(others) == []


def test_the_dashboard_has_a_short_name() -> None:
    both = {"HETPEER_DASHBOARD": "off", "HETPEER_DASHBOARD_LISTEN": "127.0.0.1:1"}
    found = merged(of_environment(both))
    assert (found.settings.dashboard.listen, found.sources["dashboard.listen"]) == (
        "off",
        "the environment's HETPEER_DASHBOARD",
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HETPEER_LIMIT_UP", "limits.up"),
        ("HETPEER_LIMITS_UPP", "limits.up"),
        ("HETPEER_WHNE_MODE", "when.mode"),
    ],
)
def test_a_misspelt_variable_is_not_overlooked(name: str, meant: str) -> None:
    error = refused(*of_environment({name: "5mbit"}))
    assert name in error.what
    assert error.why == f"the nearest name is {meant}"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"limits.upp": "5mbit"}, "limits.up"),
        ({"limit.up": "5mbit"}, "limits.up"),
        ({"up": "5mbit"}, "no name is like it"),
        ({"limits.up": "fast"}, "'fast' is no rate"),
        ({"limits.up": "1kbit"}, "256kbit is the least"),
        ({"limits.cpu": -1}, "it must be greater than or equal to 0"),
        ({"limits.cpu": "many"}, "it must be a valid integer"),
        ({"limits.temperature_c": 900}, "less than or equal"),
        ({"when.hours": ["7 to 9"]}, "no time of the day"),
        ({"when.mode": "sometimes"}, "'always'"),
        ({"when.mode": "schedule"}, "needs hours"),
        ({"network.port": 70000}, "less than or equal"),
        ({"compute.device": "gpu"}, "'gpu' is none of auto, all, cpu, cuda and cuda:N"),
        ({"compute.device": "cuda0"}, "'cuda0' is none of"),
        ({"network.host": "localhost"}, "IPv4 or IPv6"),
    ],
)
def test_what_cannot_be_is_named(values: dict[str, Any], said: str) -> None:
    error = refused(SettingsLayer("here", values))
    assert said in error.why
    assert next(iter(values)) in error.what or "when.hours" in error.what


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("up = ", "it is no TOML: "),
        ("\xff", "it is not a text file in UTF-8"),
        ("[limits]\nup = 5", "it must be a valid string"),
        ("limits = 3", "the nearest name is limits."),
    ],
)
def test_a_file_that_cannot_be(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "config.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(LocalError, match="HP-CONF-003") as caught:
        effective(tmp_path, {})
    assert str(tmp_path / "config.toml") in caught.value.what
    assert caught.value.why.startswith(why)


def test_one_line_changes(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    write(path, {"limits.cpu": "1"})
    assert path.read_text() == FILE.replace("cpu = 2", "cpu = 1")
    write(path, {"when.mode": "schedule"})
    write(path, {"node.name": 'the "big" one \\ ü'})
    write(path, {"when.hours": "12:00-13:00"})
    text = path.read_text()
    assert text.startswith('# mine\n[limits]\nup = "5mbit"  # the neighbours complain\n')
    assert tomllib.loads(text) == {
        "limits": {"up": "5mbit", "cpu": 1},
        "when": {"mode": "schedule", "hours": ["12:00-13:00"]},
        "node": {"name": 'the "big" one \\ ü'},
    }


@pytest.mark.parametrize(
    ("key", "value"), [("limits.up", "fast"), ("limits.upp", "5mbit"), ("when.mode", "x")]
)
def test_nothing_changes_that_cannot_be(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    with pytest.raises(LocalError, match="HP-CONF-003"):
        write(path, {key: value})
    assert path.read_text() == FILE
    assert stat.S_ISREG(path.stat().st_mode)


def test_a_dashboard_is_served_somewhere(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    with pytest.raises(LocalError, match="HP-WEB-002"):
        write(path, {"dashboard.listen": "99999"})
    assert path.read_text() == FILE
    write(path, {"dashboard.listen": "127.0.0.1:8787"})


def test_what_the_file_is_a_link_to_changes_and_stays_as_private_as_it_was(tmp_path: Path) -> None:
    kept, path = tmp_path / "dotfiles" / "hetpeer.toml", tmp_path / "config.toml"
    kept.parent.mkdir()
    kept.write_text(FILE)
    kept.chmod(0o600)
    path.symlink_to(kept)
    write(path, {"limits.cpu": "1"})
    assert path.is_symlink()
    assert kept.read_text() == FILE.replace("cpu = 2", "cpu = 1")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ['[when]\nhours = [\n "22:00-07:00",\n]\n', "limits = { cpu = 2 }\n"])
def test_what_a_program_cannot_change_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(LocalError, match="by hand"):
        write(path, {"when.hours": "12:00-13:00"} if "hours" in text else {"limits.cpu": "1"})
    assert path.read_text() == text


@given(name=st.text(max_size=64), cpu=st.integers(0, 64), games=st.booleans())
def test_any_value_is_read_as_it_was_written(name: str, cpu: int, games: bool) -> None:
    text = ""
    for key, value in (("node.name", name), ("limits.cpu", cpu), ("when.yield_to_games", games)):
        text = edited(edited(text, key, value), key, value)
    found = tomllib.loads(text)
    assert (found["node"]["name"], found["limits"]["cpu"], found["when"]["yield_to_games"]) == (
        name,
        cpu,
        games,
    )


def test_what_takes_a_new_worker() -> None:
    settings = Settings()
    for key, value in (
        ("limits.ram", "20%"),
        ("compute.threads", "2"),
        ("limits.cpu", "2"),
        ("node.name", "a"),
    ):
        assert changed(settings, key, value, "").needs_new_worker(settings)
    for key, value in (("limits.up", "5mbit"), ("when.on_battery", "run"), ("limits.cpu", "1")):
        assert not changed(settings, key, value, "").needs_new_worker(settings)


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETPEER_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert config_path(tmp_path / "state" / "hetpeer") == tmp_path / "config" / "hetpeer" / "config.toml"
    assert config_path(tmp_path / "other") == tmp_path / "other" / "config.toml"
    assert read(tmp_path / "none.toml").values == {}


async def test_a_daemon_that_cannot_have_it_so_leaves_the_file_alone(tmp_path: Path) -> None:
    """As when the hours of a schedule were written into the file after it began.

    Its error has its own exit status.
    """
    asked: list[ControlRequest] = []

    def answer(request: ControlRequest) -> DaemonStatus:
        asked.append(request)
        changed(Settings(), str(request.key), request.value, "the owner")
        return DaemonStatus(state="training", since=1.0)

    path, arguments = tmp_path / "config.toml", ["config", "set", "--home", str(tmp_path)]
    path.write_text('[when]\nhours = ["22:00-07:00"]\n')
    before = path.read_text()
    async with serving(tmp_path, answer):
        run = CliRunner().invoke
        refused = await asyncio.to_thread(run, app, [*arguments, "when.mode", "schedule"])
        assert isinstance(refused.exception, LocalError)
        assert (refused.exception.code, refused.exception.exit_code) == ("HP-CONF-003", ExitCode.CONFIG)
        assert path.read_text() == before
        wrong = await asyncio.to_thread(run, app, [*arguments, "limits.up", "fast"])
        assert isinstance(wrong.exception, LocalError)
        assert len(asked) == 1, "what the file cannot say is asked of nobody"
        done = await asyncio.to_thread(run, app, [*arguments, "limits.up", "5mbit"])
        assert done.output == f"{path}: limits.up is 5mbit from now on\n"
        later = await asyncio.to_thread(run, app, [*arguments, "network.port", "4001"])
        assert later.output == f"{path}: network.port is 4001 from the next start on\n"
    assert path.read_text() == before + '\n[limits]\nup = "5mbit"\n\n[network]\nport = 4001\n'


def test_from_the_command_line(tmp_path: Path) -> None:
    run, home = CliRunner(), str(tmp_path / "home")
    said = run.invoke(app, ["config", "set", "limits.cpu", "1", "--home", home])
    assert said.exit_code == 0
    assert "no volunteer runs" in said.output
    assert run.invoke(app, ["config", "path", "--home", home]).output.strip() == f"{home}/config.toml"
    shown = run.invoke(app, ["config", "show", "--home", home]).output.splitlines()
    assert next(line.split() for line in shown if line.startswith("limits.cpu ")) == [
        *("limits.cpu", "1", f"{home}/config.toml")
    ]
    refused = run.invoke(app, ["config", "set", "limits.cpus", "1", "--home", home])
    assert isinstance(refused.exception, LocalError)
    assert refused.exception.code == "HP-CONF-003"
