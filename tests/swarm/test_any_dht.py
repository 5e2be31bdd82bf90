"""A run in a DHT of hivemind's own programs: others read what it stores there, and join through any node."""

import ast
import re
import signal
from pathlib import Path

import pytest

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode
from tests.dht.hivemind_programs import client, hivemind_dht
from tests.swarm.child import until
from tests.swarm.conftest import make_run
from tests.swarm.forkserver import ROOT, ForkServer
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


@pytest.fixture
def other(tmp_path: Path, server: ForkServer) -> RunDirectory:
    """A run of another author."""
    folder = tmp_path / "other"
    folder.mkdir()
    make_run(folder, server)
    return RunDirectory.open(folder / "run")


def example() -> str:
    """The lines that docs/protocol.md gives to read adverts with."""
    page = (ROOT / "docs/protocol.md").read_text()
    (lines,) = re.findall(r"```python\n(import hivemind\n.*?)```", page, re.DOTALL)
    return str(lines)


async def test_a_node_of_hivemind_is_a_way_into_the_run_of_its_dht(swarm: Swarm) -> None:
    training = swarm.run.manifest.training.model_copy(update={"steps": 1000})
    layouts = (((0, len(swarm.run.manifest.blocks)),),)
    swarm.run = resign(swarm.run, training=training, layouts=layouts)
    async with hivemind_dht() as first, hivemind_dht(first) as address:
        await swarm.bootstrap("--peers", first)
        volunteer = swarm.volunteer("volunteer", via=address)
        await swarm.committed(2)
        adverts = ast.literal_eval(await client(example(), ADDRESS=address, RUN=swarm.run.run_id))
    reliable = swarm.address.rpartition("/")[2]
    assert set(adverts) == {reliable, volunteer.peer_id}
    assert swarm.address in adverts[reliable]["addresses"]
    assert adverts[volunteer.peer_id]["block_end"] == len(swarm.run.manifest.blocks)
    await swarm.stored(2)
    await swarm.left([volunteer])


async def test_of_several_runs_in_a_dht_one_is_chosen_by_its_id(swarm: Swarm, other: RunDirectory) -> None:
    async with hivemind_dht() as address:
        await swarm.bootstrap("--peers", address)
        second = swarm.reliable(other.path, "--peers", address, home=other.path)
        await until(lambda: second.printed, "the second run is served")
        undecided = swarm.volunteer("undecided", via=address)
        assert await undecided.ended() == ExitCode.USAGE
        assert "HP-ADDR-004: there are 2 runs in the DHT of the given peers" in undecided.said
        assert all(f"--run {run}" in undecided.said for run in (swarm.run.run_id, other.run_id))
        decided = swarm.volunteer("decided", "--run", other.run_id, via=address)
        await decided.says("in the run ")
        second.signal(signal.SIGINT)
        await second.ended()
