"""Options of `join`: there is one for each setting of the file, and what it says is what counts."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.cli.main import app
from hetpeer.peer.cli.options import command_of
from hetpeer.peer.cli.volunteer import join_command
from hetpeer.peer.limits import config_file
from hetpeer.peer.limits.setting_layers import MergedSettings, of_environment
from hetpeer.peer.limits.settings import KEYS, Settings

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
ONCE = {"--bootstrap", "--run", "--home", "--for", "--dry-run", "--trace"}
"""What is said of one call, and so is no setting."""
OTHER = {
    "node.name": "grandma",
    "compute.device": "cpu",
    "compute.offload": "disk",
    "when.mode": "schedule",
    "when.hours": "22:00-07:00",
    "when.idle_after": "5m",
    "when.on_battery": "run",
    "network.host": "127.0.0.1",
    "dashboard.listen": "off",
    "limits.ram": "1GiB",
    "limits.gpu_memory": "80%",
    "limits.disk": "1GiB",
    "limits.files": "1GiB",
    "limits.up": "5mbit",
    "limits.down": "5mbit",
    "limits.transfer_cap": "300GB",
}
"""A value of each setting that is a text, and not its default."""


def options() -> dict[str, list[str]]:
    """The setting that each option's help names → what is typed to give it another value; of others, under
    their own name, nothing.
    """
    found = {}
    for option in command_of(join_command.join).params:
        named = re.search(r"\[(\w+\.\w+)\]$", getattr(option, "help", None) or "")
        key = named[1] if named else "dashboard.listen" if option.name == "dashboard" else ""
        if key in OTHER:
            found[key] = [option.opts[0], OTHER[key]]
        elif key and option.secondary_opts:
            found[key] = [(option.opts if not Settings().flat()[key] else option.secondary_opts)[0]]
        elif key:
            found[key] = [option.opts[0], "7"]
        elif option.param_type_name == "option":
            found[option.opts[0]] = []
    return found


def test_every_setting_has_an_option_and_every_other_option_is_of_one_call() -> None:
    assert set(options()) == {*KEYS, *ONCE}


def test_what_an_option_says_is_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[MergedSettings] = []
    effective = config_file.effective
    monkeypatch.delenv("HETPEER_DASHBOARD", raising=False)
    monkeypatch.setattr(config_file, "effective", lambda *given: found.append(effective(*given)) or found[-1])
    monkeypatch.setattr(join_command, "only_checked", lambda _: True)
    monkeypatch.setattr(join_command, "need_lan", lambda: None)
    typed = [word for words in options().values() for word in words]
    done = CliRunner().invoke(app, ["join", "--home", str(tmp_path), "--bootstrap", ADDRESS, *typed])
    assert done.exit_code == 0, done.output
    default, settings = Settings().flat(), found[0].settings.flat()
    assert [key for key in KEYS if settings[key] == default[key]] == []
    assert {str(settings[key]) for key in KEYS} >= {*OTHER.values()} - {OTHER["when.hours"]}
    assert set(found[0].sources.values()) == {"the command line"}


def test_every_setting_has_a_variable_and_the_page_says_what_its_option_is() -> None:
    named = {f"HETPEER_{key.replace('.', '_').upper()}": key for key in KEYS}
    assert [key for layer in of_environment(dict.fromkeys(named, "1")) for key in layer.values] == [*KEYS]
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    for key, words in options().items():
        if words:
            assert re.search(rf"^\| .*`{re.escape(key)}`.* \| .*`{words[0]}", page, re.MULTILINE), key


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--for", "a while"], "no time such as"),
        (["--for", "9999d"], "longer than a year"),
        (["--temp-limit", "900"], "less than or equal to 150"),
        (["--nice", "20"], "less than or equal to 19"),
    ],
)
def test_what_an_option_cannot_be(tmp_path: Path, words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["join", "--home", str(tmp_path), "--bootstrap", ADDRESS, *words])
    assert done.exit_code == ExitCode.USAGE
    assert said in done.output


@pytest.mark.parametrize("words", [["--vram-limit", "much"], ["--on-battery", "fly"], ["--idle-after", "x"]])
def test_what_a_setting_cannot_be(tmp_path: Path, words: list[str]) -> None:
    done = CliRunner().invoke(app, ["join", "--home", str(tmp_path), "--bootstrap", ADDRESS, *words])
    assert isinstance(done.exception, LocalError)
    assert done.exception.code == "HP-CONF-003"
    assert "the command line" in done.exception.what


def test_a_run_that_nobody_serves_is_down_and_not_unknown(tmp_path: Path) -> None:
    """Whoever watches it can tell that from a wrong option."""
    (tmp_path / "manifest.hetpeer").write_bytes(b"a run's directory")
    ended = CliRunner().invoke(app, ["status", "--home", str(tmp_path)])
    assert isinstance(ended.exception, LocalError)
    assert (ended.exception.code, ended.exception.exit_code) == ("HP-CTL-001", ExitCode.NOT_RUNNING)
    assert f"hetpeer bootstrap {tmp_path} does" in ended.exception.why


@pytest.mark.parametrize("command", ["status", "doctor", "dashboard", "plan", "join"])
def test_an_invite_needs_no_option(command: str, tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, [command, "hetpeer://cut", "--home", str(tmp_path)])
    assert isinstance(ended.exception, LocalError)
    assert ended.exception.code == "HP-ADDR-003"


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ([], "always"),
        (["--hours", "22:00-07:00"], "schedule"),
        (["--idle-after", "20m"], "idle"),
        (["--hours", "22:00-07:00", "--idle-after", "20m"], "schedule"),
        (["--hours", "22:00-07:00", "--when", "always"], "always"),
    ],
)
def test_who_says_hours_means_them(
    words: list[str], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[MergedSettings] = []
    effective = config_file.effective
    monkeypatch.setattr(config_file, "effective", lambda *given: found.append(effective(*given)) or found[-1])
    monkeypatch.setattr(join_command, "only_checked", lambda _: True)
    (tmp_path / "config.toml").write_text('[when]\nmode = "always"\n')
    done = CliRunner().invoke(app, ["join", "--home", str(tmp_path), "--bootstrap", ADDRESS, *words])
    assert done.exit_code == 0, done.output
    assert found[0].settings.when.mode == mode


def test_a_setting_that_counts_in_another_mode_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    words = ["config", "set", "--home", str(tmp_path)]
    done = CliRunner().invoke(app, [*words, "when.hours", "22:00-07:00"])
    assert "hetpeer config set when.mode schedule" in done.stderr
    done = CliRunner().invoke(app, [*words, "when.mode", "schedule"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert CliRunner().invoke(app, [*words, "when.hours", "23:00-07:00"]).stderr == ""


def test_a_setting_that_the_environment_names_too_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETPEER_LIMITS_UP", "2mbit")
    words = ["config", "set", "--home", str(tmp_path)]
    done = CliRunner().invoke(app, [*words, "limits.up", "5mbit"])
    assert "the environment's HETPEER_LIMITS_UP overrides it" in done.stderr
    assert CliRunner().invoke(app, [*words, "limits.down", "5mbit"]).stderr == ""
