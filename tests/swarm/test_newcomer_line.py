"""A volunteer that has never worked measures its line, and tells it with its first advert (laboratory)."""

import json
import subprocess
import sys
from typing import Any

import pytest

from hetpeer.peer.probing.line_probe import BYTES
from tests.swarm.advert_observer import __name__ as observer
from tests.swarm.child import until
from tests.swarm.swarm import Swarm
from tests.wanlab.lab import ROOT, Lab, needs_lab

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300), needs_lab]
UP_MBPS, DOWN_MBPS = 20.0, 100.0
MBIT = 125e3
LAB = {
    "nodes": 4,
    "latency_ms": 12,
    "uplink_mbps": [1000, UP_MBPS, 1000, 1000],
    "downlink_mbps": [1000, DOWN_MBPS, 1000, 1000],
    "queue_ms": 150,
}


def adverts_of(swarm: Swarm, name: str) -> list[dict[str, Any]]:
    """What another node has read of the volunteer `name`, in order."""
    lines = (swarm.folder / "observed").read_text().splitlines()
    return [advert for advert in map(json.loads, lines) if advert.get("name") == name]


@pytest.mark.alone
async def test_the_first_advert_has_the_line_and_what_is_offered(swarm: Swarm) -> None:
    """Uplink and downlink within a fifth, in another node's DHT, before it has a place; and within 4 MB."""
    with Lab(LAB) as swarm.lab:
        await swarm.bootstrap()
        command = (sys.executable, "-m", observer, swarm.address, swarm.run.run_id, swarm.lab.address(2))
        with (swarm.folder / "observed").open("w") as out:
            swarm.lab.start(2, command, stdin=subprocess.PIPE, stdout=out, cwd=ROOT)
        await until(lambda: (swarm.folder / "observed").stat().st_size, "the observer is there", 60.0)
        newcomer = swarm.volunteer("newcomer", node=1)
        await newcomer.says("measured the line")
        await until(
            lambda: any(a.get("memory_bytes") for a in adverts_of(swarm, "newcomer")), "an advert", 60.0
        )
        first = next(a for a in adverts_of(swarm, "newcomer") if a.get("memory_bytes"))
        carried = swarm.lab.stats()
        swarm.end()
    kept = json.loads((newcomer.home / "line.json").read_text())
    print(
        f"uplink {first['uplink'] / MBIT:.1f} of {UP_MBPS:g} Mbit/s, downlink {first['downlink'] / MBIT:.1f}"
        f" of {DOWN_MBPS:g}, round trip {1e3 * kept['trip_s']:.1f} ms, {kept['probed_bytes']:,} bytes;"
        f" the laboratory carried {carried['forwarded_bytes']:,} in all"
    )
    assert first.get("block_end", 0) == 0, "it has no place yet"
    assert first["uplink"] == pytest.approx(UP_MBPS * MBIT, rel=0.2)
    assert first["downlink"] == pytest.approx(DOWN_MBPS * MBIT, rel=0.2)
    assert first["device"]
    assert first["flops_per_second"] > 0
    assert len(first["coordinate"]) == 5
    assert kept["trip_s"] == pytest.approx(0.024, rel=0.3)
    assert 0 < kept["probed_bytes"] <= BYTES
