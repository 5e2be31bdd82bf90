"""Confined services: what a daemon and p2pd can no longer do, and that a run is trained all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetpeer.dht.base import landlock
from hetpeer.dht.base.runtime import process_folder
from hetpeer.dht.p2pd.confinement import confined
from hetpeer.peer.process.confinement import VARIABLE
from tests.bootstrap.engine import make_run

ROOT = Path(__file__).parents[2]


def landlock_version() -> int:
    try:
        return landlock.abi()
    except OSError:
        return 0


pytestmark = pytest.mark.skipif(landlock_version() < 1, reason="this kernel has no Landlock (before 5.13)")

ATTEMPTS = """
import json, os, socket, subprocess, sys
from pathlib import Path
from hetpeer.peer.process.confinement import confine_service

home, secret = map(Path, sys.argv[1:])
confine_service([home])

def attempt(act):
    try:
        act()
    except (OSError, subprocess.CalledProcessError) as error:
        return type(error).__name__
    return "done"

def keep():
    (home / "a").write_text("x")
    (home / "a").rename(home / "b")
    (home / "b").unlink()

listening = socket.create_server(("127.0.0.1", 0))
print(json.dumps({
    "reads": attempt(secret.read_text),
    "lists": attempt(lambda: os.listdir(secret.parent)),
    "writes": attempt(lambda: secret.write_text("")),
    "makes": attempt(lambda: (secret.parent / "new").touch()),
    "child": attempt(lambda: subprocess.run(["cat", secret], check=True, capture_output=True)),
    "own": attempt(keep),
    "resolver": attempt(lambda: open("/etc/resolv.conf").read()),
    "processor": attempt(lambda: open("/proc/stat").read()),
    "program": attempt(lambda: subprocess.run(["true"], check=True)),
    "network": attempt(lambda: socket.create_connection(listening.getsockname()).close()),
    "package": attempt(lambda: __import__("hetpeer.peer.cli.main")),
}))
"""
FORBIDDEN = ("reads", "lists", "writes", "makes")
NEEDED = ("own", "resolver", "processor", "program", "network", "package")


def attempts(folder: Path, **environment: str) -> dict[str, str]:
    secret = folder / "owner" / "identity.key"
    secret.parent.mkdir()
    secret.write_text("secret")
    # whatever is in the folder of temporary files is the daemon's: this test's folder is another one
    (folder / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, str(folder / "home" / "state"), str(secret)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp"), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_a_service_has_its_own_files_only(tmp_path: Path) -> None:
    found = attempts(tmp_path, **{VARIABLE: "yes"})
    assert {name: found[name] for name in FORBIDDEN} == dict.fromkeys(FORBIDDEN, "PermissionError")
    assert {name: found[name] for name in NEEDED} == dict.fromkeys(NEEDED, "done")
    assert found["child"] == "CalledProcessError"
    assert (tmp_path / "owner" / "identity.key").read_text() == "secret"


@pytest.mark.parametrize("environment", [{}, {VARIABLE: "yes", landlock.VARIABLE: "off"}])
def test_only_where_it_is_asked_for(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "home" / "state").mkdir(parents=True)
    assert set(attempts(tmp_path, **environment).values()) == {"done"}


def test_p2pd_reads_its_key_and_changes_its_sockets_only(tmp_path: Path) -> None:
    """Another program in its place tries it."""
    key, secret, sockets = tmp_path / "keys" / "p2pd.key", tmp_path / "keys" / "secret", tmp_path / "sockets"
    key.parent.mkdir()
    sockets.mkdir()
    key.write_text("key")
    secret.write_text("secret")
    script = (
        f"cat {key}; cat {secret}; echo x > {sockets}/a && echo made; echo x > {key.parent}/a; kill -0 $PPID"
    )
    with confined(Path("/usr"), key, sockets) as confine:
        done = subprocess.run(
            ["/usr/bin/sh", "-c", script], capture_output=True, text=True, check=False, preexec_fn=confine
        )
    assert done.stdout == "keymade\n"
    assert done.stderr.count("Permission denied") == 2, done.stderr
    if landlock_version() >= 6:
        assert done.returncode != 0, "it signals nobody"
    assert not (key.parent / "a").exists()


@pytest.mark.swarm
def test_a_confined_reliable_peer_and_volunteer_train_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "author")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: "yes", "NO_COLOR": "1"}
    temporary = process_folder("tests")  # a short path: sockets are in it
    environment["TMPDIR"] = temporary.name

    def started(home: str, *arguments: str) -> subprocess.Popen[str]:
        where = ("--host", "127.0.0.1", "--dashboard", "off", "--home", str(tmp_path / home))
        return subprocess.Popen(
            [sys.executable, "-m", "hetpeer.peer.cli.main", *arguments, *where],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    serving = started("reliable", "bootstrap", str(run.path), "--port", "0")
    volunteers = []
    try:
        assert serving.stdout is not None
        line = serving.stdout.readline()
        assert line, serving.communicate()
        address = line.split()[-1]
        volunteers = [
            started(name, "join", "--bootstrap", address, "--name", name) for name in ("one", "other")
        ]
        for process in (serving, *volunteers):
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said
            assert "finished: " in said
            assert "can use its user's files" not in said
            assert "less confined" not in said
        assert (tmp_path / "one" / "config.toml").exists(), "it could remember its name"
    finally:
        for process in (serving, *volunteers):
            process.kill()
            process.communicate()
