"""A run and a home that commit e32fc21 wrote (before the package had rooms) are read, and the run goes on
from there.

`run_of_e32fc21.tar.xz` has a run directory with 12 of 60 steps committed, every process of it killed at once;
the home of its volunteer with a `config.toml`; and the author's model and data.
"""

import tarfile
from pathlib import Path

import pytest

from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.peer.limits.config_file import effective
from tests.amounts import mostly_proof
from tests.swarm.forkserver import ForkServer
from tests.swarm.swarm import Swarm

pytestmark = pytest.mark.swarm

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "run_of_e32fc21.tar.xz"
VOLUNTEER = "QmVL5QdzL6jmGSnsSvqVneQMUX13S1Q82HudMMwt9vK3Mf"
STEPS = 60
COMMITTED = 12
SOME = 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    author = tmp_path / "run" / "author.json"
    author.write_text(author.read_text().replace("tiny.py", f"{tmp_path}/tiny.py"))
    return tmp_path


@pytest.mark.parametrize("steps", mostly_proof([SOME, STEPS], [SOME]))
async def test_a_run_of_an_earlier_version_goes_on(folder: Path, server: ForkServer, steps: int) -> None:
    """To its end, or until so many steps are stored: each exactly once, and one machine's in either case.

    The logs of the earlier version do not say in which order gradients were added. Its only volunteer added
    them by id, so that bits may be equal all the same.
    """
    swarm = Swarm(folder, RunDirectory.open(folder / "run"), server)
    try:
        assert swarm.judged().steps == COMMITTED
        await swarm.bootstrap()
        volunteer = swarm.volunteer("vhome")
        if steps == STEPS:
            await swarm.finished(volunteer, swarm.children[0])
        else:
            await swarm.stored(steps)
            await swarm.left([volunteer])
        verdict, replayed = swarm.judged(), replay(swarm.run.path)
        assert replayed.ok, replayed.problems
        assert replayed.near + replayed.equal == verdict.steps >= steps
        assert volunteer.peer_id == VOLUNTEER
    finally:
        swarm.end()


def test_the_settings_of_an_earlier_version_count(folder: Path) -> None:
    merged = effective(folder / "vhome", {})
    assert merged.settings.limits.up == "50Mbit/s"
    assert merged.settings.when.idle_after == "20m"
