"""What a running daemon warns of: as doctor says it, and nothing where nothing is wrong."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.reach.reachability import ReachEstimate, ReachKind
from hetpeer.peer.checkup import local_checks
from hetpeer.peer.checkup.thresholds import GIB, MIB, clock, open_files
from hetpeer.peer.limits.nvml import Gpus
from hetpeer.peer.limits.sensors import idle_unknown
from hetpeer.peer.web import machine_warnings
from hetpeer.peer.web.machine_warnings import CODES, MachineWarnings


@pytest.fixture(autouse=True)
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of which there is nothing to say."""
    monkeypatch.setattr(local_checks, "clock", lambda: clock(True))
    monkeypatch.setattr(local_checks, "open_files", lambda: open_files(4096, 4096))
    room(monkeypatch, 100 * GIB)


def room(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(machine_warnings.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))


def codes(made: MachineWarnings) -> list[str]:
    return [warning.code for warning in made.look()]


@pytest.mark.parametrize("reach", [ReachKind.UNKNOWN, ReachKind.PUBLIC])
def test_nothing_is_wrong(tmp_path: Path, reach: ReachKind) -> None:
    assert codes(MachineWarnings(tmp_path, lambda: ReachEstimate(reach=reach, peers=1, ip="192.0.2.1"))) == []


def test_everything_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what would keep a volunteer from starting; and every code is one that metrics have."""
    monkeypatch.setattr(local_checks, "clock", lambda: clock(False))
    monkeypatch.setattr(local_checks, "open_files", lambda: open_files(64, 64))
    room(monkeypatch, MIB)
    unused = Gpus(driver="580", names=("A10",)).unused("2.13.0+cpu")
    assert unused is not None
    standing = ReachEstimate(reach=ReachKind.PRIVATE, peers=2)
    full = LocalError("HP-DISK-002", f"no room to write {tmp_path}/log", why="full", fix="free some")
    made = MachineWarnings(tmp_path, lambda: standing, lambda: [unused, idle_unknown(), full])
    assert sorted(codes(made)) == sorted(CODES)
    assert all(one.what and one.why and one.fix for one in made.look())
    assert str(tmp_path) not in repr(made.look()), "others of this machine may see the page"


def test_a_folder_that_is_gone_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_path: Path) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(machine_warnings.shutil, "disk_usage", gone)
    assert codes(MachineWarnings(tmp_path, ReachEstimate)) == []


def test_it_goes_away(tmp_path: Path) -> None:
    found: list[LocalError] = [idle_unknown()]
    made = MachineWarnings(tmp_path, ReachEstimate, lambda: found)
    assert codes(made) == ["HP-SYS-007"]
    found.clear()
    assert codes(made) == []
