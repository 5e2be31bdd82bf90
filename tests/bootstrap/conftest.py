"""One tiny run for the whole session: traced, cut and trained once; tests work on copies."""

import shutil
from pathlib import Path

import pytest

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.identity.peer_identity import Identity
from tests.bootstrap.engine import Engine, make_run


@pytest.fixture(scope="session")
def volunteers(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("identities")
    return [Identity.create(folder / name) for name in ("a", "b")]


@pytest.fixture(scope="session")
def fresh_template(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("fresh"))


@pytest.fixture(scope="session")
def trained_template(
    fresh_template: RunDirectory, volunteers: list[Identity], tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    path = tmp_path_factory.mktemp("trained") / "run"
    shutil.copytree(fresh_template.path, path)
    run = RunDirectory.open(path)
    Engine(run, volunteers).train()
    return run


@pytest.fixture
def fresh(fresh_template: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A run as `hetpeer init` leaves it."""
    shutil.copytree(fresh_template.path, tmp_path / "run")
    return RunDirectory.open(tmp_path / "run")


@pytest.fixture
def trained(trained_template: RunDirectory, tmp_path: Path) -> RunDirectory:
    """The same run after four steps and a rollback."""
    shutil.copytree(trained_template.path, tmp_path / "run")
    return RunDirectory.open(tmp_path / "run")
