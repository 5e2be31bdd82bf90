"""One tiny run for the whole session, and a swarm per test on a copy of it."""

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetpeer.bootstrap.run.run_directory import RunDirectory
from tests.swarm.child import until
from tests.swarm.forkserver import ROOT, ForkServer
from tests.swarm.swarm import Swarm, resign

STEPS = 20
MODEL = """
from gpt import build as build_gpt

def build():
    return build_gpt(width=32, layers=4, heads=2, context=16)
"""
SETTINGS = {
    "steps": STEPS,
    "batch-size": 12,
    "microbatch-size": 2,
    "sequence-length": 16,
    "eval-every": 8,
    "eval-samples": 3,
    "checkpoint-every": 5,
    "seed": 3,
}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what is made once for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def once(folder: Path, name: str) -> Iterator[bool]:
    """Whether `name` is still to be made in `folder`; the other workers wait meanwhile."""
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not (folder / f"{name}.made").exists()
        (folder / f"{name}.made").touch()


def make_run(folder: Path, server: ForkServer) -> None:
    """Make a run as `hetpeer init` leaves it, in `folder`."""
    shutil.copy(ROOT / "hetpeer" / "examples" / "gpt.py", folder)
    (folder / "tiny.py").write_text(MODEL)
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(400)))
    options = [f"--{name}={value}" for name, value in SETTINGS.items()]
    arguments = ["init", str(folder / "run"), f"--model={folder}/tiny.py:build", f"--data={folder}/text.txt"]
    arguments.append("--unchecked")  # tests of spot checks turn them on
    log = str(folder / "init.log")
    pid = server.start(arguments=[*arguments, *options], home=str(folder), out=log, err=log)
    asyncio.run(until(lambda: server.status(pid) is not None, "hetpeer init is done", within_s=100.0))
    run = RunDirectory.open(folder / "run")
    resign(run, training=run.manifest.training.model_copy(update={"slot_size": 2}))


@pytest.fixture(autouse=True)
def _forked(forked_replay: None) -> None:
    """Compute replays in a fork."""


@pytest.fixture(scope="session")
def template(shared: Path, server: ForkServer) -> RunDirectory:
    """A run as `hetpeer init` leaves it: 6 blocks, 20 steps of 6 microbatches."""
    with once(shared, "run") as to_make:
        if to_make:
            make_run(shared, server)
    return RunDirectory.open(shared / "run")


@pytest.fixture
def swarm(tmp_path: Path, template: RunDirectory, server: ForkServer) -> Iterator[Swarm]:
    """A swarm without processes."""
    shutil.copytree(template.path, tmp_path / "run")
    swarm = Swarm(tmp_path, RunDirectory.open(tmp_path / "run"), server)
    yield swarm
    swarm.end()
