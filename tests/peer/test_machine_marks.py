"""Who shares a processor or a line, by adverts, and what a processor's mark tells others."""

import math
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.discovery import Advert
from hetpeer.peer.daemon.machine_offer import boot_id, processor_of
from hetpeer.peer.planning.device_files import devices_in
from hetpeer.peer.planning.machine_marks import sharing_fields, slowed
from hetpeer.peer.planning.swarm_inventory import inventory
from hetpeer.peer.training.volunteer_figures import ProcessorPart
from tests.bootstrap.engine import make_run

HOME, OTHER = "/ip4/93.184.216.34/tcp/1", "/ip4/1.1.1.1/tcp/1"


def volunteer(processor: str = "", *addresses: str, computes: float = 0.0, part: float = 0.5) -> Advert:
    return Advert(
        role="volunteer",
        memory_bytes=1 << 30,
        flops_per_second=1e9,
        uplink=1e6,
        addresses=addresses,
        processor=processor,
        processor_part=part if processor else 0.0,
        computes=computes,
    )


def test_those_with_one_mark_share_a_processor_and_those_behind_one_address_a_line() -> None:
    relayed = f"{HOME}/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC/p2p-circuit"
    adverts = {
        "a": volunteer("one", "/ip4/192.168.1.2/tcp/1", HOME),
        "b": volunteer("one", HOME),
        "c": volunteer("two", HOME, part=0.25),
        "d": volunteer("three", OTHER),
        "e": volunteer("", "/ip4/192.168.1.2/tcp/1", "/ip4/127.0.0.1/tcp/1"),
        "f": volunteer("", "/ip4/192.168.1.2/tcp/1", relayed),
        "g": volunteer("four", "/ip4/127.0.0.1/tcp/1"),
        "h": volunteer("four", "/dns4/a.example/tcp/1"),
        "i": volunteer("", "/ip6/2606:4700:1:2::5/tcp/1"),
        "j": volunteer("", "/ip6/2606:4700:1:2:3::/tcp/1"),
    }
    found = sharing_fields(adverts)
    half = {"processor": 1, "processor_part": 0.5}
    assert found["a"] == found["b"] == half | {"line": 1}
    assert found["c"] == {"line": 1}
    assert found["d"] == found["e"] == found["f"] == {}
    assert found["g"] == found["h"] == half | {"processor": 2, "line": 2}
    assert found["i"] == found["j"] == {"line": 3}


def test_what_was_measured_beside_others_is_taken_for_what_it_does_alone() -> None:
    """Each takes half of the processor while it computes, and the others computed half of the time."""
    adverts = {peer: volunteer("one", computes=0.5) for peer in "abcd"} | {"e": volunteer("", computes=1.0)}
    assert slowed(adverts, "a") == pytest.approx(0.5 + 3 * 0.25)
    assert slowed(adverts, "e") == 1.0
    assert slowed({peer: adverts[peer] for peer in "ab"}, "a") == 1.0
    silent = {peer: a.model_copy(update={"processor_part": 0.0}) for peer, a in adverts.items()}
    assert slowed(silent, "a") == pytest.approx(1.0 + 3 * 0.5)


def test_a_file_of_a_swarm_says_what_is_shared_and_the_planner_reads_it(tmp_path) -> None:
    run = make_run(tmp_path)
    adverts = {peer: volunteer("one", HOME, computes=1.0) for peer in ("a", "b", "c")} | {"d": volunteer()}
    found = inventory(run.manifest, adverts)
    text = "\n".join(found.lines())
    devices = devices_in(tomllib.loads(text), "a file").devices
    assert devices.sharing is not None
    assert devices.sharing.processor.tolist() == devices.sharing.line.tolist() == [0, 0, 0, 1]
    assert devices.sharing.part.tolist() == [0.5, 0.5, 0.5, 1.0]
    assert devices.flops.tolist() == pytest.approx([1.5e9] * 3 + [1e9])
    plain = inventory(run.manifest, {"d": volunteer()})
    assert devices_in(plain.document(), "adverts").devices.sharing is None
    assert "93.184" not in text


@pytest.mark.parametrize("wrong", [{"processor": -1}, {"line": 1.5}, {"processor": 1, "processor_part": 0.0}])
def test_a_wrong_entry_on_sharing_is_named(wrong: dict[str, float]) -> None:
    entry = {"name": "attic", "tflops": 1.0, "memory_gib": 1.0} | wrong
    with pytest.raises(LocalError, match="HP-PLAN-002"):
        devices_in({"device": [entry, {"name": "office", "tflops": 1.0, "memory_gib": 1.0}]}, "a file")


def test_a_mark_is_of_one_processor_in_one_run_and_does_not_show_what_it_is_made_of() -> None:
    one = ProcessorPart("a boot id", 0.5)
    assert one.mark("a run") == replace(one, part=1.0).mark("a run")
    marks = {one.mark("a run"), one.mark("another"), ProcessorPart("other boot", 0.5).mark("a run")}
    assert len(marks) == 3
    assert all(len(mark) == 12 for mark in marks)
    assert ProcessorPart().mark("a run") == ""


def test_what_computes_is_the_processor_of_this_boot_or_a_gpu() -> None:
    cpu = SimpleNamespace(device="cpu", device_uuid="", threads=1)
    gpu = SimpleNamespace(device="cuda:0", device_uuid="GPU-1", threads=1)
    assert processor_of([cpu], "boot", 4, math.inf) == ProcessorPart("boot", 0.25)
    assert processor_of([cpu], "boot", 4, 0.5) == ProcessorPart("boot", 0.125), "of a container"
    assert processor_of([replace_threads(cpu, 8)], "boot", 4, math.inf) == ProcessorPart("boot", 1.0)
    assert processor_of([gpu], "boot", 4, 0.5) == ProcessorPart("GPU-1", 1.0)
    assert processor_of([cpu], "", 4, 1.0) == processor_of([cpu, gpu], "boot", 4, 1.0) == ProcessorPart()
    assert boot_id() == boot_id() != ""


def replace_threads(info: SimpleNamespace, threads: int) -> SimpleNamespace:
    return SimpleNamespace(**(vars(info) | {"threads": threads}))
