"""Which lines of its log a volunteer gives to a coordinator: each once, also with an identity that was
somewhere else before.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpeer.averaging.effects import StepId
from hetpeer.averaging.messages import TermView
from hetpeer.bootstrap.log.volunteer_log import sign_event
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.discovery import LeftoverIds
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.process.home import Home
from hetpeer.peer.training.evidence_log import EvidenceLog
from tests.bootstrap.engine import make_run

STEP = StepId(TermView(term=1, view=0), 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.create(tmp_path / "key")


class Volunteer:
    """Processes with one home, one after the other, each under an incarnation above those of all homes.

    Coordinators keep its lines.
    """

    incarnation = 0

    def __init__(self, home: Path, run: RunDirectory, identity: Identity) -> None:
        self._home, self._run, self._identity = Home(home), run, identity
        self._written = 0
        self.starts()

    def starts(self) -> None:
        Volunteer.incarnation += 1
        run = RunDirectory(self._home.path / "run", self._run.signed)
        self.evidence = EvidenceLog(self._home, run, self._identity)

    def meets(self, coordinator: list[str]) -> None:
        """A session begins: the coordinator says which line is its last."""
        for lines in self.evidence.after(coordinator[-1] if coordinator else ""):
            coordinator += lines

    def writes(self, count: int, *coordinators: list[str]) -> None:
        """Of what was found; each line arrives at `coordinators`."""
        for _ in range(count):
            self._written += 1
            found = LeftoverIds(border=0, ids=(self._written,))
            step = StepId(STEP.line, self._written)
            (line,) = self.evidence.found(step, self.incarnation, "somebody", found)
            for coordinator in coordinators:
                coordinator.append(line)

    def loses(self, count: int) -> None:
        """The power fails, and the last lines were not on the disk yet."""
        path = self._home.path / "run" / "events.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-count]))
        self.starts()

    @property
    def log(self) -> list[str]:
        return (self._home.path / "run" / "events.jsonl").read_text().splitlines()


def test_every_line_arrives_once_whatever_breaks(
    run: RunDirectory, identity: Identity, tmp_path: Path
) -> None:
    kept: list[str] = []
    volunteer = Volunteer(tmp_path / "home", run, identity)
    volunteer.writes(3, kept)
    volunteer.writes(2)
    volunteer.meets(kept)
    volunteer.writes(1)
    volunteer.starts()
    volunteer.meets(kept)
    assert kept == volunteer.log
    volunteer.meets(kept)
    assert kept == volunteer.log
    another: list[str] = []  # a coordinator that has nothing of it yet
    volunteer.meets(another)
    assert another == volunteer.log


def test_a_restored_identity_tells_nothing_twice_to_any_coordinator(
    run: RunDirectory, identity: Identity, tmp_path: Path
) -> None:
    first: list[str] = []
    second: list[str] = []
    old = Volunteer(tmp_path / "old", run, identity)
    old.writes(2, first, second)
    old.writes(3, first)
    before = [list(first), list(second)]
    new = Volunteer(tmp_path / "new", run, identity)
    new.meets(first)
    new.writes(3, first)
    for coordinator in (second, first, second):
        new.meets(coordinator)
        new.starts()
        new.writes(1, coordinator)
        new.meets(coordinator)
    new.meets(first)
    assert [first, second] == [before[0] + new.log, before[1] + new.log]


def test_what_a_restored_identity_wrote_before_it_met_anybody_arrives(
    run: RunDirectory, identity: Identity, tmp_path: Path
) -> None:
    kept: list[str] = []
    Volunteer(tmp_path / "old", run, identity).writes(2, kept)
    before = list(kept)
    new = Volunteer(tmp_path / "new", run, identity)
    new.writes(3)
    new.meets(kept)
    assert kept == before + new.log


def test_an_identity_that_comes_back_to_its_first_home_tells_nothing_twice(
    run: RunDirectory, identity: Identity, tmp_path: Path
) -> None:
    kept: list[str] = []
    homes = [Volunteer(tmp_path / name, run, identity) for name in ("one", "other")]
    for number in range(4):
        home = homes[number % 2]
        home.starts()
        home.meets(kept)
        home.writes(2, kept)
        home.writes(1)
        home.meets(kept)
    assert len(kept) == len(set(kept)) == 12
    assert set(kept) == {*homes[0].log, *homes[1].log}


def test_lines_that_a_power_cut_took_from_the_volunteer_are_told_by_the_coordinators_log_only(
    run: RunDirectory, identity: Identity, tmp_path: Path
) -> None:
    kept: list[str] = []
    volunteer = Volunteer(tmp_path / "home", run, identity)
    volunteer.writes(5, kept)
    before = list(kept)
    volunteer.loses(2)
    volunteer.writes(1)
    volunteer.meets(kept)
    assert kept == [*before, volunteer.log[-1]]


def test_a_line_that_is_not_ours_is_refused(run: RunDirectory, identity: Identity, tmp_path: Path) -> None:
    volunteer = Volunteer(tmp_path / "home", run, identity)
    stranger = Identity.create(tmp_path / "stranger")
    for last in ("x", sign_event({"incarnation": 1}, stranger), sign_event({"incarnation": ""}, identity)):
        with pytest.raises(ProtocolError):
            volunteer.evidence.after(last)


def test_whoever_shows_one_leftover_after_the_other_fills_no_log(
    tmp_path: Path, run: RunDirectory, identity: Identity
) -> None:
    """In one step; a coordinator that is told more than there can be to say drops whoever tells it."""
    blocks, evidence = len(run.manifest.blocks), EvidenceLog(Home(tmp_path), run, identity)
    for step in (STEP, StepId(STEP.line, 1)):
        told = [
            evidence.found(step, 1, "somebody", LeftoverIds(border=0, ids=(n,))) for n in range(9 * blocks)
        ]
        assert [len(lines) for lines in told] == [1] * blocks + [0] * 8 * blocks
