"""A house: two machines on a wire, and one joins the other's run without an address."""

import signal
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from hetpeer.dht.base.errors import ExitCode
from tests.swarm.swarm import Swarm, resign
from tests.wanlab.lab import needs_lab

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
NAMES = ("hetpeer-house-a", "hetpeer-house-b")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def house() -> Iterator[SimpleNamespace]:
    """Network namespaces with a cable between; as the laboratory, whose nodes are routers apart, for
    `Swarm.lab`.
    """
    for name in NAMES:
        subprocess.run(
            ["ip", "netns", "delete", name], check=False, capture_output=True
        )  # of a test that was killed
        ip("netns", "add", name)
    try:
        ip("-n", NAMES[0], "link", "add", "lan0", "type", "veth", "peer", "lan0", "netns", NAMES[1])
        for number, name in enumerate(NAMES):
            ip("-n", name, "address", "add", f"192.168.77.{number + 1}/24", "dev", "lan0")
            for device in ("lo", "lan0"):
                ip("-n", name, "link", "set", device, "up")
        yield SimpleNamespace(namespace=NAMES.__getitem__, address=lambda node: f"192.168.77.{node + 1}")
    finally:
        for name in NAMES:
            ip("netns", "delete", name)


@needs_lab
async def test_a_machine_of_the_house_joins_without_an_address(swarm: Swarm, house: SimpleNamespace) -> None:
    training = swarm.run.manifest.training.model_copy(update={"steps": 1000})
    swarm.run = resign(swarm.run, training=training, layouts=(((0, len(swarm.run.manifest.blocks)),),))
    swarm.lab = house  # type: ignore[assignment]
    early = swarm.start("early", "join", "--lan", node=1)
    assert await early.ended() == ExitCode.NETWORK
    assert "HP-NET-016: no run is found in the local network" in early.said
    bootstrap = await swarm.bootstrap("--lan")
    silent = swarm.start("silent", "join", node=1)
    assert await silent.ended() == ExitCode.USAGE, "without --lan nobody is asked"
    volunteer = swarm.start("near", "join", "--lan", "--host", "192.168.77.2", node=1)
    await volunteer.says(f"({swarm.run.run_id})")
    await swarm.committed(2)
    await swarm.stored(2)
    for child in (volunteer, bootstrap):
        child.signal(signal.SIGINT)
        assert await child.ended() == 0, child.said
    assert swarm.judged().steps
    other = swarm.start("other", "join", "--lan", "--run", "0" * 32, node=1)
    assert await other.ended() == ExitCode.NETWORK
