"""`make setup` takes the newest Python that works, and says in one line what is missing where none does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKE = """#!/bin/sh
case "$*" in
    *version_info*) echo {version} ;;
    scripts/usable_python.py) echo '{missing}' >&2; [ -z '{missing}' ] ;;
    "-m venv --clear .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    "-m pip install"*) echo "$*" >>pip.log ;;
    "-m pip --version") ;;
    *) exit 1 ;;
esac
"""
SHIM = "#!/bin/sh\necho 'command not found' >&2; exit 127\n"
"""Stands for pyenv's shim of a version that is switched off."""

Setup = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with what the set-up reads, and a folder `bin` with the few tools that it calls, but no
    Python.
    """
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt", "hashes.txt"):
        shutil.copy(ROOT / name, tmp_path)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "bin").mkdir()
    for name in ("sh", "tail", "touch", "mkdir", "cp", "sed"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    return tmp_path


@pytest.fixture
def setup(tree: Path) -> Setup:
    """Run the set-up in `tree`, where only the Pythons in its `bin` are found."""

    def run(*asked: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(tree / "bin")}
        command = ["sh", "scripts/setup.sh", *asked]
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)

    return run


def add_python(tree: Path, name: str, *, version: str = "", missing: str = "") -> None:
    path = tree / "bin" / name
    path.write_text(FAKE.format(version=version or name[6:], missing=missing))
    path.chmod(0o755)


def add_shim(tree: Path, name: str) -> None:
    path = tree / "bin" / name
    path.write_text(SHIM)
    path.chmod(0o755)


def made_with(tree: Path) -> str:
    done = subprocess.run(
        [tree / ".venv/bin/python", "version_info"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_newest_python_that_works_is_taken(tree: Path, setup: Setup) -> None:
    add_shim(tree, "python3.14")
    add_python(tree, "python3.13", missing="no ensurepip")
    add_python(tree, "python3.12")
    add_python(tree, "python3.11")
    assert setup().returncode == 0
    assert made_with(tree) == "3.12"
    assert (tree / "pip.log").read_text().count("constraints.txt") == 2


def test_what_builds_packages_is_installed_first_by_its_hash(tree: Path, setup: Setup) -> None:
    """Else pip would fetch it without one, for each package that has no wheel."""
    add_python(tree, "python3.12")
    assert setup().returncode == 0
    first, second, *_ = (tree / "pip.log").read_text().splitlines()
    assert first == "-m pip install -q --require-hashes --no-deps -r .venv/builds.txt"
    assert second.endswith("--require-hashes --no-deps --prefer-binary --no-build-isolation -r hashes.txt")
    pin, *hashes = (tree / ".venv/builds.txt").read_text().replace(" \\\n", " ").split()
    assert pin in (ROOT / "constraints.txt").read_text().split()
    assert pin.startswith("setuptools==")
    assert hashes
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes)


def test_python3_is_taken_where_it_has_no_other_name(tree: Path, setup: Setup) -> None:
    add_python(tree, "python3", version="3.13")
    assert setup().returncode == 0
    assert made_with(tree) == "3.13"


def test_nothing_is_done_again_until_the_pins_change(tree: Path, setup: Setup) -> None:
    add_python(tree, "python3.12")
    setup()
    (tree / "pip.log").unlink()
    again = setup()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert not (tree / "pip.log").exists()
    os.utime(tree / ".venv/.stamp", (1, 1))
    add_python(tree, "python3.13")
    setup()
    assert (tree / "pip.log").exists()
    assert made_with(tree) == "3.12", "an environment that works stays"


def test_the_python_asked_for_wins(tree: Path, setup: Setup) -> None:
    add_python(tree, "python3.11")
    add_python(tree, "python3.13")
    assert setup("python3.11").returncode == 0
    assert made_with(tree) == "3.11"
    assert setup("python3.13").returncode == 0
    assert made_with(tree) == "3.13"


@pytest.mark.parametrize(
    ("names", "asked", "says"),
    [
        ((), (), "no Python 3.11 to 3.14 was found: apt-get install python3 python3-venv"),
        (("python3.12", "python3"), (), "python3.12: no ensurepip"),
        (("python3.12",), ("python3.13",), "python3.13 was not found, or does not start"),
        (("python3.12",), ("python3.12",), "python3.12: no ensurepip"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    tree: Path, setup: Setup, names: tuple[str, ...], asked: tuple[str, ...], says: str
) -> None:
    for name in names:
        add_python(tree, name, version="3.9", missing="no ensurepip" if name != "python3" else "too old")
    done = setup(*asked)
    assert done.returncode == 3
    assert done.stderr.startswith(f"hetpeer: {says}")
    assert done.stderr.count("\n") == 1
    assert not (tree / ".venv").exists()


def missing(folder: Path, change: str) -> str:
    """What the check says on this Python after `change` to it; empty if nothing is missing."""
    (folder / "sitecustomize.py").write_text(change)
    command = [sys.executable, ROOT / "scripts/usable_python.py"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not done.stderr)
    return done.stderr.strip()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("", ""),
        ("import sys; sys.version_info = (3, 10, 1)", "this is Python 3.10, and hetpeer needs 3.11 to 3.14"),
        ("import sys; sys.version_info = (3, 15, 0)", "this is Python 3.15, and hetpeer needs 3.11 to 3.14"),
        (
            "import sys; sys.platform = 'darwin'",
            "this is darwin on x86_64, and hetpeer runs on Linux on x86-64 only",
        ),
        ("import platform; platform.machine = lambda: 'aarch64'", "this is linux on aarch64"),
        ("import sys; sys.modules['ssl'] = None", "lacks ssl"),
        ("import sys; sys.modules['ensurepip'] = None", "-venv"),
    ],
)
def test_a_python_says_what_it_lacks(tmp_path: Path, change: str, says: str) -> None:
    said = missing(tmp_path, change)
    assert says in said
    assert bool(said) == bool(says)
    assert "\n" not in said


def test_hashes_are_of_the_versions_that_are_pinned() -> None:
    """Each package that the set-up installs besides torch has one; tools for few people have none."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    text = (ROOT / "hashes.txt").read_text().replace(" \\\n", " ")
    hashed = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            pin, *hashes = line.split()
            assert hashes, line
            assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), line
            name, version = pin.split("==")
            hashed[name] = version
    assert hashed.items() <= pinned.items()
    assert {"hivemind", "numpy", "cryptography", "pydantic_core", "setuptools", "pytest"} <= hashed.keys()
    assert "torch" not in hashed
