"""The systemd user service: the unit by systemd's own word, the commands with a systemctl that writes down
what it is told.
"""

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.cli.volunteer.service_command import commands
from hetpeer.peer.control.control_messages import DaemonStatus
from hetpeer.peer.control.owned_daemon import serving
from hetpeer.peer.daemon import systemd_units
from tests.bootstrap.engine import make_run

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
SYSTEMCTL = """#!/bin/sh
echo "$@" >> "$0.told"
case "$2" in
    show)
        printf 'ActiveState=active\\nSubState=running\\n'
        printf 'UnitFileState=enabled\\nStatusText=paused (user)\\n' ;;
esac
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What systemctl was told; the user's configuration is in a folder of the test."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "systemctl").write_text(SYSTEMCTL)
    (tmp_path / "bin" / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "bin" / "systemctl.told"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("kind", ["volunteer", "reliable peer"])
def test_systemd_understands_the_unit(tmp_path: Path, kind: str) -> None:
    unit = {
        "volunteer": systemd_units.VOLUNTEER,
        "reliable peer": systemd_units.serving(tmp_path / "50% ü $x"),
    }[kind]
    unit = systemd_units.writable(unit, [tmp_path / '50% "ü" $x', Path("/nowhere")])
    path = tmp_path / unit.name
    path.write_text(systemd_units.unit_text(["/bin/true", 'a "name" with 50% $HOME \\ and\nmore'], unit))
    said = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(path)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("kind", ["volunteer", "reliable peer"])
def test_the_unit_gives_up_what_it_does_not_need(tmp_path: Path, kind: str) -> None:
    """By systemd's own judgement, from 0 to 10, all of it exposed; half of the rest are rights of root, which
    a user's service has not.
    """
    unit = systemd_units.VOLUNTEER if kind == "volunteer" else systemd_units.serving(tmp_path)
    path = tmp_path / unit.name
    path.write_text(systemd_units.unit_text(["/bin/true"], systemd_units.writable(unit, [tmp_path])))
    said = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(path)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if "Unknown option" in said.stderr or "unrecognized option" in said.stderr:
        pytest.skip("this systemd judges running services only")
    found = re.search(r"exposure level for \S+: ([0-9.]+)", said.stdout)
    assert found, said
    assert float(found[1]) <= 5.4, said.stdout


def test_nothing_in_a_word_is_expanded() -> None:
    text = systemd_units.unit_text(["join", '50% "$x" \\'])
    assert 'ExecStart="join" "50%% \\"$$x\\" \\\\"\n' in text
    assert "RestartPreventExitStatus=2 3 4 8 11\n" in text
    assert "RestartForceExitStatus=75\n" in text


def test_it_looks_for_home_and_settings_where_this_shell_does(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", '/state/50% "$x"')
    home = ["--home", str(tmp_path / "home")]
    none = CliRunner().invoke(commands, ["install", *home])
    assert isinstance(none.exception, LocalError), "it would go back to the last run, and there was none"
    assert not told.exists()
    assert CliRunner().invoke(commands, ["install", *home, "--bootstrap", ADDRESS]).exit_code == 0
    text = systemd_units.unit_path().read_text()
    assert 'Environment="XDG_STATE_HOME=/state/50%% \\"$x\\""\n' in text
    assert f'Environment="XDG_CONFIG_HOME={tmp_path}/config"\n\n[Install]\n' in text
    assert 'Environment="' not in systemd_units.unit_text(["join"])
    assert f'ReadWritePaths="-{tmp_path}/home"\n' in text, "the service may change it"


def test_a_reliable_peer_does_not_give_way_and_is_back_soon() -> None:
    text = systemd_units.unit_text(["bootstrap"], systemd_units.serving(Path("/runs/50%")))
    assert "Description=hetpeer bootstrap in /runs/50%%\n" in text
    assert "Nice=0\n" in text
    assert "RestartSec=5\n" in text
    for line in ("Type=notify", "WatchdogSec=120", "TimeoutStartSec=infinity"):
        assert f"{line}\n" in text


def test_each_reliable_peer_has_a_unit_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = ("/a/my run", "/b/my run", "/a/my-run", "/a/" + "long" * 60, "/")
    units = [systemd_units.serving(Path(folder)).name for folder in folders]
    assert len(set(units)) == len(folders)
    assert all(re.fullmatch(r"hetpeer-bootstrap-[\w.-]{0,64}-[0-9a-f]{8}\.service", name) for name in units)
    monkeypatch.chdir(tmp_path)
    assert systemd_units.serving(Path("run")) == systemd_units.serving(tmp_path / "run")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = make_run(tmp_path / "there").path
    return made.rename(made.with_name("my run"))


def test_a_reliable_peer_installed_looked_at_and_uninstalled(
    told: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From where it is made: the service finds it from everywhere."""
    monkeypatch.chdir(run.parent)
    home = str(tmp_path / "home")
    options = ["bootstrap", "my run/", "--port", "4001", "--stand-in", "--home", home]
    done = CliRunner().invoke(commands, ["install", *options])
    assert done.exit_code == 0, done.output
    unit = systemd_units.serving(run)
    assert f"to see its state: hetpeer status --home {run}\n" in done.output
    text = systemd_units.unit_path(unit).read_text()
    assert f'"bootstrap" "--home" "{home}" "{run}" "--port" "4001" "--stand-in"\n' in text
    assert told.read_text().splitlines()[2:] == [
        f"--user enable {unit.name}",
        f"--user restart --no-block {unit.name}",
    ]
    assert not systemd_units.unit_path().exists(), "a volunteer is another one"
    looked = CliRunner().invoke(commands, ["status", "my run"])
    assert looked.stdout.splitlines()[1] == f"enabled {systemd_units.unit_path(unit)}"
    none = CliRunner().invoke(commands, ["status"])
    assert isinstance(none.exception, LocalError)
    assert "service install --bootstrap ADDR" in none.exception.fix
    assert CliRunner().invoke(commands, ["uninstall", str(run)]).exit_code == 0
    assert not systemd_units.unit_path(unit).exists()
    gone = CliRunner().invoke(commands, ["status", str(run)])
    assert isinstance(gone.exception, LocalError)
    assert "service install bootstrap DIR" in gone.exception.fix


def test_a_rendezvous_installed(told: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(commands, ["install", "bootstrap", "--home", str(tmp_path / "home")])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "home" / "rendezvous"
    assert f"to see its state: hetpeer status --home {folder}\n" in done.output
    text = systemd_units.unit_path(systemd_units.serving(folder)).read_text()
    assert f'"bootstrap" "--home" "{tmp_path}/home"\n' in text
    assert told.exists()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["nowhere"], "HP-RUN-004"),
        (["nowhere", "--peers", "x"], "HP-ADDR-001"),
        (["my run", "--dashboard", "x"], "HP-WEB-002"),
        (["--stand-in"], None),
        (["--dashboard", "8787"], None),
        (["my run", "--port", "70000"], None),
        (["my run", "--nonsense"], None),
    ],
)
def test_what_bootstrap_would_refuse(
    options: list[str], code: str | None, told: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    done = CliRunner().invoke(commands, ["install", "bootstrap", *options])
    if code is None:
        assert done.exit_code == ExitCode.USAGE
    else:
        assert isinstance(done.exception, LocalError)
        assert done.exception.code == code
    assert not told.exists()


def test_what_this_shell_sets_is_not_in_force_there(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETPEER_LIMITS_UP", "5mbit")
    done = CliRunner().invoke(commands, ["install", "--home", str(tmp_path / "home"), "--bootstrap", ADDRESS])
    assert done.exit_code == 0, done.output
    assert "HETPEER_LIMITS_UP is set in this shell only" in done.output
    assert told.exists()


def test_installed_looked_at_and_uninstalled(told: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    done = CliRunner().invoke(
        commands, ["install", "--home", str(home), "--bootstrap", ADDRESS, "--name", "me"]
    )
    assert done.exit_code == 0, done.output
    text = systemd_units.unit_path().read_text()
    assert f'"join" "--home" "{home}" "--bootstrap" "{ADDRESS}" "--name" "me"\n' in text
    assert told.read_text().splitlines() == [
        "--user daemon-reload",
        "--user daemon-reload",
        "--user enable hetpeer.service",
        "--user restart --no-block hetpeer.service",
    ]
    looked = CliRunner().invoke(commands, ["status"])
    assert looked.stdout.splitlines() == [
        "active (running): paused (user)",
        f"enabled {systemd_units.unit_path()}",
    ]
    told.unlink()
    assert CliRunner().invoke(commands, ["start"]).exit_code == 0
    assert told.read_text().splitlines() == ["--user restart --no-block hetpeer.service"]
    told.unlink()
    assert CliRunner().invoke(commands, ["uninstall"]).exit_code == 0
    assert told.read_text().splitlines() == [
        "--user disable --now hetpeer.service",
        "--user daemon-reload",
    ]
    assert not systemd_units.unit_path().exists()
    with pytest.raises(LocalError, match="HP-SVC-002") as caught:
        systemd_units.uninstall()
    assert caught.value.exit_code == ExitCode.NOT_RUNNING


@pytest.mark.parametrize(
    "options",
    [
        ["--bootstrap", ADDRESS, "--port", "x"],
        ["--bootstrap", ADDRESS, "--nonsense"],
        ["--bootstrap", ADDRESS, "--dry-run"],
    ],
)
def test_what_join_would_not_take(options: list[str], told: Path) -> None:
    assert CliRunner().invoke(commands, ["install", *options]).exit_code == ExitCode.USAGE
    assert not told.exists()
    assert not systemd_units.unit_path().exists()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--bootstrap", "/ip4/127.0.0.1/tcp/9"], "HP-ADDR-001"),
        (["--bootstrap", ADDRESS, "--ram-limit", "much"], "HP-CONF-003"),
        (["hetpeer://no-invite"], "HP-ADDR-003"),
        (["--bootstrap", ADDRESS, "--run", "x"], "HP-ADDR-003"),
        (["--bootstrap", ADDRESS, "--dashboard", "x"], "HP-WEB-002"),
        (["--name", "me"], "HP-ADDR-002"),  # this home was in no run yet
    ],
)
def test_what_join_would_refuse(options: list[str], code: str, told: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(commands, ["install", "--home", str(tmp_path / "home"), *options])
    assert isinstance(done.exception, LocalError)
    assert done.exception.code == code
    assert not told.exists()
    assert not systemd_units.unit_path().exists()


def test_without_systemd_nothing_is_left(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (told.parent / "systemctl").write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n")
    with pytest.raises(LocalError, match=r"HP-SVC-001.*Failed to connect to bus"):
        systemd_units.install(["join"])
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LocalError, match="HP-SVC-001"):
        systemd_units.install(["join"])
    assert not systemd_units.unit_path().exists()
    assert not systemd_units.lingers()


async def test_a_volunteer_that_runs_already_is_in_the_way(told: Path, tmp_path: Path) -> None:
    """As after a first `join` in a terminal: the service would end with HP-ID-002 again and again, and
    begin when the other is stopped.
    """
    home = tmp_path / "home"
    home.mkdir()
    words = ["install", "--home", str(home), "--bootstrap", ADDRESS]
    async with serving(home, lambda _: DaemonStatus(state="training", since=1.0)):
        done = await asyncio.to_thread(CliRunner().invoke, commands, words)
        again = await asyncio.to_thread(CliRunner().invoke, commands, words)
    assert "hetpeer stop" in done.stderr
    assert "hetpeer stop" not in again.stderr, "it is the service itself"
    assert told.exists()
