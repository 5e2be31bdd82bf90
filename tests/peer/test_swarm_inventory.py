"""A swarm written down as a file of devices: what was measured, what is taken for the rest, and that a
plan can be made of it.
"""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.discovery import Advert, LinkNote
from hetpeer.peer.cli.swarm.device_plans import SwarmQuestion, plan_swarm
from hetpeer.peer.planning.advert_lines import lines_of
from hetpeer.peer.planning.device_files import devices_in, read_devices
from hetpeer.peer.planning.model_workload import USUAL
from hetpeer.peer.planning.swarm_inventory import Inventory, inventory
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.pipeline.place_memory import Offered
from hetpeer.stages.planning.swarms.plan_inputs import LATENCY_S
from tests.bootstrap.engine import make_run

FRONT, BACK, NEW = "QmTheFrontPeer", "QmTheBackPeer1", "QmTheNewcomer1"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Four blocks."""
    return make_run(tmp_path_factory.mktemp("inventory"))


def volunteer(**fields: object) -> Advert:
    known: dict[str, object] = {"role": "volunteer", "memory_bytes": 1 << 30, "flops_per_second": 1e9}
    return Advert(**(known | fields))


def swarm(run: RunDirectory) -> Inventory:
    """Two that train, the one over 20 Mbit/s and 30 ms there and back, the other over 100, and one that is
    new.
    """
    onwards = LinkNote(to=BACK[-8:], rate=2.5e6, trip_s=0.03)
    backwards = LinkNote(to=FRONT[-8:], rate=12.5e6)
    adverts = {
        FRONT: volunteer(
            name="attic",
            block_end=2,
            forward_s=0.1,
            backward_s=0.3,
            links=(onwards,),
            uplink=2e6,
            between_s=0.4,
        ),
        BACK: volunteer(name="attic", block_begin=2, block_end=4, links=(backwards,), between_s=0.6),
        NEW: volunteer(name="office"),
        "QmTheReliable1": Advert(role="coordinator", memory_bytes=1 << 30),
        "QmTheSilentOne": Advert(role="volunteer"),
    }
    return inventory(run.manifest, adverts)


def test_main_memory_disk_and_offload_are_those_of_the_adverts(run: RunDirectory) -> None:
    """An older version says nothing of them: it has one memory and no offload."""
    gib = 1 << 30
    told = {"host_bytes": 12 * gib, "disk_bytes": 40 * gib}
    adverts = {
        FRONT: volunteer(offload="auto", **told),
        BACK: volunteer(offload="everything", disk_bytes=gib),
        NEW: volunteer(),
    }
    found = inventory(run.manifest, adverts)
    devices = devices_in(found.document(), "adverts").devices
    offered = {peer: devices.offered(number) for number, peer in enumerate(found.peers)}
    assert offered[FRONT] == Offered(device=gib, host=12 * gib, disk=40 * gib, kinds=tuple(Offload))
    assert offered[BACK] == Offered(device=gib, disk=gib, kinds=(Offload.NONE,))
    assert list(offered[NEW].ways()) == [(Offload.NONE, False)]


def test_one_that_has_only_multiplied_matrices_is_no_faster_than_those_that_tried_blocks(
    run: RunDirectory,
) -> None:
    adverts = {
        FRONT: volunteer(flops_per_second=3e9, product_flops=10e9),
        BACK: volunteer(flops_per_second=1e9, product_flops=2e9),
        NEW: volunteer(flops_per_second=10e9, product_flops=10e9),
    }
    found = inventory(run.manifest, adverts)
    speeds = {peer: device["tflops"] for peer, device in zip(found.peers, found.devices, strict=True)}
    assert speeds == {FRONT: 3e-3, BACK: 1e-3, NEW: pytest.approx(0.4 * 10e-3)}


def test_what_was_measured_and_what_is_taken_for_the_rest(run: RunDirectory) -> None:
    found = swarm(run)
    back, front, new = found.devices
    assert [front["name"], back["name"], new["name"]] == ["attic…ntPeer", "attic…kPeer1", "office"]
    forward = sum(block.flops_forward for block in run.manifest.blocks[:2])
    assert front["tflops"] == pytest.approx(3 * forward / 0.4 / 1e12, rel=1e-3)
    assert new["tflops"] == 1e-3
    assert (front["up_mbps"], back["up_mbps"], new["up_mbps"]) == (20.0, 100.0, 60.0)
    assert (front["down_mbps"], back["down_mbps"]) == (100.0, 100.0)
    latency, bandwidth = np.array(found.latency_ms), np.array(found.bandwidth_gbit_s)
    assert latency[1, 0] == latency[0, 1] == 15.0
    assert bandwidth[1, 0] == 0.02
    assert bandwidth[0, 1] == 0.1
    assert bandwidth[2, 0] == 0.06
    assert not latency.diagonal().any()
    assert found.between_s == 0.4


def test_a_downlink_is_that_of_the_probe_unless_more_came_over_a_link(run: RunDirectory) -> None:
    """2 MB/s arrive at FRONT although it says 1; BACK says 0.5, less than its uplink; nobody knows of NEW."""
    note = LinkNote(to=FRONT[-8:], rate=2e6)
    adverts = {
        FRONT: volunteer(uplink=1e6, downlink=1e6),
        BACK: volunteer(uplink=4e6, downlink=5e5, links=(note,)),
        NEW: volunteer(uplink=3e6),
    }
    found = inventory(run.manifest, adverts)
    down = {peer: device["down_mbps"] for peer, device in zip(found.peers, found.devices, strict=True)}
    assert down == {FRONT: 16.0, BACK: 4.0, NEW: 24.0}
    rates = np.array(found.bandwidth_gbit_s)
    new, back = found.peers.index(NEW), found.peers.index(BACK)
    assert rates[new, back] == 0.004, "a line is no faster than its far end takes"


def test_a_claim_that_several_links_contradict_is_not_believed(run: RunDirectory) -> None:
    """FRONT says 100 MB/s and sends 1 over both links; that one of them is slow says nothing of it."""
    both = tuple(LinkNote(to=peer[-8:], rate=1e6) for peer in (BACK, NEW))
    fast = {"uplink": 1e8, "downlink": 1e8}
    adverts = {FRONT: volunteer(**fast, links=both), BACK: volunteer(**fast), NEW: volunteer(**fast)}
    lines = lines_of(adverts)
    assert (lines.up[0], lines.down[0], lines.down[1]) == (1e6, 1e8, 1e8)
    one = lines_of(adverts | {FRONT: volunteer(**fast, links=both[:1])})
    assert one.up[0] == 1e8, "it may be the other end"
    slow = adverts | {BACK: volunteer(uplink=1e6, downlink=1e6), NEW: volunteer(uplink=1e6, downlink=1e6)}
    assert lines_of(slow).up[0] == 1e8, "the other ends take no more, as they say"


def test_bundles_too_short_for_tcp_to_become_fast_are_no_rate_of_their_line(run: RunDirectory) -> None:
    """16 kB over 300 ms there and back arrive at 1 Mbit/s, whatever the line carries."""
    fast = {"uplink": 1e7, "downlink": 1e7}
    short = LinkNote(to=BACK[-8:], rate=1.25e5, trip_s=0.3, activation_bytes=16_000)
    adverts = {FRONT: volunteer(**fast, links=(short,)), BACK: volunteer(**fast)}
    lines = lines_of(adverts)
    assert lines.rate[0, 1] == 1e7
    assert not lines.measured[0, 1]
    long = short.model_copy(update={"activation_bytes": 100_000})
    lines = lines_of(adverts | {FRONT: volunteer(**fast, links=(long,))})
    assert (lines.rate[0, 1], lines.measured[0, 1]) == (1.25e5, True)


def test_a_downlink_that_several_senders_contradict_is_not_believed(run: RunDirectory) -> None:
    fast = {"uplink": 1e8, "downlink": 1e8}
    onwards = (LinkNote(to=FRONT[-8:], rate=1e6),)
    adverts = {FRONT: volunteer(**fast), **{p: volunteer(**fast, links=onwards) for p in (BACK, NEW)}}
    lines = lines_of(adverts)
    assert (lines.down[0], lines.up[0], lines.up[1]) == (1e6, 1e8, 1e8)


def test_lines_that_nobody_used_are_estimated_from_coordinates_and_their_neighbours(
    run: RunDirectory,
) -> None:
    """Three in each of two towns; two lines from town to town carry 1 MB/s, the ends would allow 10."""
    towns = [(0, 0, 0, 200, 5), (20_000, 0, 0, 200, 5)]
    peers = [f"QmPeer{number}Home" for number in range(6)]
    adverts = {
        peer: volunteer(uplink=1e7, downlink=1e7, coordinate=towns[number // 3])
        for number, peer in enumerate(peers)
    }
    for number in (0, 1):
        note = LinkNote(to=peers[3 + number][-8:], rate=1e6, trip_s=0.204)
        adverts[peers[number]] = adverts[peers[number]].model_copy(update={"links": (note,)})
    found = inventory(run.manifest, adverts)
    assert found.bandwidth_gbit_s[2][5] == pytest.approx(0.008)
    assert found.bandwidth_gbit_s[0][1] == pytest.approx(0.08)
    assert found.latency_ms[2][5] == pytest.approx(102.0)
    assert found.latency_ms[0][1] == pytest.approx(2.0)
    assert not found.measured[2, 5]
    assert found.doubt[2, 5] > found.doubt[0, 3] == 1.0


def test_coordinates_that_are_none_are_as_none(run: RunDirectory) -> None:
    for claim in ((1,), (2**30,) * 5, (0, 0, 0, -1, 5)):
        found = inventory(run.manifest, {FRONT: volunteer(coordinate=claim), BACK: volunteer()})
        assert found.latency_ms[0][1] == 1e3 * LATENCY_S


def test_what_sums_take_does_not_lie_between_two_steps(run: RunDirectory) -> None:
    """Two hold the same blocks, so that each sends its half of a sum and half of the gradients, at 1 MB/s."""
    gradient_mb = 4 * sum(block.vector_count for block in run.manifest.blocks) / 1e6
    adverts = {
        peer: volunteer(block_end=4, uplink=1e6, between_s=gradient_mb + 0.7) for peer in (FRONT, BACK)
    }
    found = inventory(run.manifest, adverts)
    hops = 2 * LATENCY_S
    assert found.between_s == pytest.approx(0.7 - hops, rel=1e-3)
    hasty = {peer: advert.model_copy(update={"between_s": 1e-3}) for peer, advert in adverts.items()}
    assert inventory(run.manifest, hasty).between_s == 0.0


@pytest.mark.parametrize("name", ["swarm.toml", "swarm.json"])
def test_a_plan_is_made_of_it(
    run: RunDirectory, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = swarm(run)
    path = tmp_path / name
    path.write_text(json.dumps(found.document()) if name.endswith("json") else "\n".join(found.lines()))
    assert read_devices(path).names == tuple(device["name"] for device in found.devices)
    asked = SwarmQuestion(
        devices=path, model=str(run.path), ratio=None, microbatches=None, seconds=0.0, seed=0, choices=USUAL
    )
    plan_swarm(asked, as_json=True)
    planned = json.loads(capsys.readouterr().out)
    assert planned["total_s"] == pytest.approx(planned["pipeline_s"] + planned["sync_s"] + 0.4)
    assert planned["between_s"] == 0.4


def test_who_is_private_and_through_whom_the_private_reach_each_other(
    run: RunDirectory, tmp_path: Path
) -> None:
    """Two that have used a line have it; others that are both private go through the front."""
    relays = ("QmTheReliable1"[-8:],)
    note = LinkNote(to=BACK[-8:], rate=2.5e6, trip_s=0.03)
    adverts = {
        FRONT: volunteer(name="a", reach="private", relays=relays, links=(note,), uplink=2e6),
        BACK: volunteer(name="b", reach="private", relays=relays),
        NEW: volunteer(name="c", reach="public"),
        "QmTheReliable1": Advert(role="reliable", reach="public"),
        "QmTheReliable2": Advert(role="reliable", reach="public"),
        "QmTheReliable3": Advert(role="coordinator", reach="private"),
    }
    found = inventory(run.manifest, adverts)
    private = {device["name"]: device.get("private", False) for device in found.devices}
    assert private == {"a": True, "b": True, "c": False}
    assert [front["name"] for front in found.fronts] == ["…iable1"]
    back, front = (found.peers.index(peer) for peer in (BACK, FRONT))
    assert found.bandwidth_gbit_s[front][back] == 0.02
    assert found.bandwidth_gbit_s[back][front] == 0.0
    path = tmp_path / "swarm.toml"
    path.write_text("\n".join(found.lines()))
    assert tomllib.loads(path.read_text()) == found.document()
    named = read_devices(path)
    assert named.through == {(back, front): "…iable1"}
    assert named.devices.bandwidth[front, back] == 2.5e6
    alone = inventory(run.manifest, {peer: adverts[peer] for peer in (FRONT, BACK)})
    path.write_text("\n".join(alone.lines()))
    assert (read_devices(path).devices.bandwidth[[0, 1], [1, 0]] > 0).all()


def test_both_forms_say_the_same(run: RunDirectory) -> None:
    found = swarm(run)
    assert tomllib.loads("\n".join(found.lines())) == found.document()


def test_a_swarm_without_volunteers(run: RunDirectory) -> None:
    with pytest.raises(LocalError, match="no volunteer has published its speed") as refused:
        inventory(run.manifest, {"QmTheSilentOne": Advert(role="volunteer")})
    assert (refused.value.code, refused.value.exit_code) == ("HP-PLAN-001", ExitCode.TRY_LATER)


def test_departures_of_the_log_are_in_the_file(run: RunDirectory) -> None:
    """A volunteer that the log does not name has no figure: it counts as the mean of the others."""
    adverts = {name: volunteer(name=name, block_end=4) for name in (FRONT, BACK, NEW)}
    found = inventory(run.manifest, adverts, {FRONT: 2.0, BACK: 0.5})
    departures = devices_in(found.document(), "here").devices.departures
    assert departures is not None
    assert (departures.rate * 3600).tolist() == pytest.approx([0.5, 2.0, 1.25])  # in the order of peer ids
    assert devices_in(inventory(run.manifest, adverts).document(), "here").devices.departures is None
