"""Which lines of its log a volunteer gives to a coordinator: each once, also with an identity that was somewhere else before."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.dht.identity import Identity
from hetpeer.peer.home import Home
from hetpeer.peer.work.evidence import Evidence
from tests.bootstrap.engine import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("run"))


class Volunteer:
    """A process after the other with one home, and the coordinator that keeps its lines."""

    def __init__(self, home: Path, run: RunDirectory, identity: Identity, kept: list[str]) -> None:
        self._home, self._run, self._identity = Home(home), run, identity
        self.kept = kept
        self.starts()

    def starts(self) -> None:
        run = RunDirectory(self._home.path / "run", self._run.signed)
        self._evidence = Evidence(self._home, run, self._identity)
        self.meets()

    def meets(self) -> None:
        """A session begins: the coordinator says how many lines it has."""
        self.kept += self._evidence.lines(len(self.kept))

    def writes(self, count: int, *, arrives: bool = True) -> None:
        for _ in range(count):
            line = self._evidence._log.append({"line": len(self.kept)})
            if arrives:
                self.kept.append(line)


def test_every_line_arrives_once_whatever_breaks(run: RunDirectory, tmp_path: Path) -> None:
    identity = Identity.create(tmp_path / "key")
    volunteer = Volunteer(tmp_path / "home", run, identity, [])
    volunteer.writes(3)
    volunteer.writes(2, arrives=False)
    volunteer.meets()
    volunteer.writes(1, arrives=False)
    volunteer.starts()
    log = (tmp_path / "home" / "run" / "events.jsonl").read_text().splitlines()
    assert volunteer.kept == log
    another: list[str] = []  # a coordinator that has nothing of it yet
    another += volunteer._evidence.lines(0)
    assert another == log


def test_a_restored_identity_tells_nothing_twice(run: RunDirectory, tmp_path: Path) -> None:
    identity = Identity.create(tmp_path / "key")
    kept: list[str] = []
    old = Volunteer(tmp_path / "old", run, identity, kept)
    old.writes(5)
    before = list(kept)
    new = Volunteer(tmp_path / "new", run, identity, kept)
    new.writes(3)
    new.meets()
    new.starts()
    new.writes(4)
    new.writes(1, arrives=False)
    new.meets()
    log = (tmp_path / "new" / "run" / "events.jsonl").read_text().splitlines()
    assert new.kept == [*before, *log]
