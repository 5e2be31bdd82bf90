"""Offers of several devices together, how a place is divided among them, and the room for microbatches."""

from pathlib import Path

import pytest

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.step_workload import demand_of
from hetpeer.peer.daemon.machine_offer import OwnersLimits, arithmetics, computes_on, device_names
from hetpeer.peer.training.place_on_devices import PlaceOnDevices
from hetpeer.peer.training.volunteer_figures import MainMemory, Offer
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.ipc.worker_messages import WorkerInfo
from hetpeer.stages.pipeline.place_memory import Offered, PlaceDemand, choose
from tests.bootstrap.engine import make_run

GIB = 1 << 30
LIMITS = OwnersLimits(ram="8GiB", gpu_memory="100%", disk="1GiB", offload="auto")
MAIN = MainMemory(limit=9 * GIB, program=GIB)
FOR_PLACES = 8 * GIB - (256 << 20)
"""The rest is for bundles."""
BLOCK = PlaceDemand(numbers=GIB // 24)
"""A GiB with everything on the device; a third of it with offload."""


def worker(device: str, total: float = 0.0) -> WorkerInfo:
    return WorkerInfo(
        device=device,
        device_name="cpu" if device == "cpu" else "A10",
        device_uuid="",
        arithmetic=f"that of {device}",
        threads=1,
        rss_bytes=0,
        device_bytes=0,
        device_free_bytes=int(total * GIB),
        device_total_bytes=int(total * GIB),
        blocks=(),
        tasks=0,
        gpus=0,
    )


def test_of_gpus_so_much_counts_as_can_be_divided() -> None:
    gpus = [worker("cuda:0", 10.0), worker("cuda:1", 5.0)]
    assert LIMITS.rooms(gpus, MAIN) == [int(9.5 * GIB), int(4.75 * GIB)]
    blocks = [BLOCK] * 9
    offered = LIMITS.offered(gpus, MAIN, GIB, blocks)
    largest = BLOCK.room(Offload.NONE, apart=True, spills=False).device
    assert offered.device == sum(LIMITS.rooms(gpus, MAIN)) - largest
    assert offered.host == FOR_PLACES
    huge = PlaceDemand(numbers=20 * GIB // 24)
    assert LIMITS.offered(gpus, MAIN, GIB, [huge]).device == int(9.5 * GIB), "as much as the larger alone"


@pytest.mark.parametrize("ram_gib", [2, 64])
def test_main_memory_does_not_bound_what_gpus_offer(ram_gib: int) -> None:
    """Two GPUs and the processor: what the GPUs offer is theirs, however little main memory there is."""
    machine = [worker("cuda:0", 10.0), worker("cuda:1", 5.0), worker("cpu")]
    main = MainMemory(limit=ram_gib * GIB, program=GIB)
    assert LIMITS.gpu_bytes(machine, main) == int(14.25 * GIB)
    assert LIMITS.gpu_bytes([worker("cpu")], main) == 0


def test_the_processor_beside_a_gpu_has_half_of_main_memory_and_alone_all_of_it() -> None:
    both = [worker("cuda:0", 10.0), worker("cpu")]
    assert LIMITS.rooms(both, MAIN) == [int(9.5 * GIB), FOR_PLACES // 2]
    assert LIMITS.offered(both, MAIN, GIB).host == FOR_PLACES // 2
    alone = [worker("cpu"), worker("cpu")]
    assert LIMITS.rooms(alone, MAIN) == [FOR_PLACES, FOR_PLACES]
    assert LIMITS.offered(alone, MAIN, GIB, [BLOCK]) == LIMITS.offered(alone[:1], MAIN, GIB, [BLOCK])


def test_the_owner_is_told_of_all_devices() -> None:
    infos = [worker("cuda:0", 10.0), worker("cuda:1", 5.0), worker("cpu")]
    line = computes_on(infos, MAIN, Offered(device=14 * GIB, host=3 * GIB))
    assert line == (
        "computes on A10, 10 GiB free + A10, 5 GiB free + 1 processor core; "
        "offers 14 GiB of GPU memory and 3 GiB of main memory (of 9 GiB the program itself takes 1 GiB)"
    )
    assert device_names(infos) == "2 x A10 + cpu"
    assert arithmetics(infos) == "that of cuda:0 + that of cuda:1 + that of cpu"
    assert arithmetics(infos[:1]) == "that of cuda:0"


def offer(*rooms: float, host: float = 0.0, speeds: tuple[float, ...] = (1.0, 1.0)) -> Offer:
    sizes = tuple(int(room * GIB) for room in rooms)
    kinds = (Offload.NONE, Offload.HOST)
    memory = Offered(device=sum(sizes), host=int(host * GIB), kinds=kinds)
    return Offer(memory=memory, main=MainMemory(limit=int(host * GIB)), rooms=sizes, speeds=speeds)


def test_a_kind_of_offload_counts_only_if_each_device_has_room() -> None:
    """Three blocks of a GiB and two devices of 1.5 GiB: together they would have room, without offload."""
    demands = [PlaceDemand(numbers=BLOCK.numbers * 6 // 7)] * 3  # 28 bytes a number without a file for slots
    two = offer(1.5, 1.5, host=8.0)
    assert choose(PlaceDemand.of_all(demands), two.memory).kind is Offload.NONE
    place = PlaceOnDevices.of(4, demands, [1.0] * 3, two)
    assert (place.choice.kind, place.fits) == (Offload.HOST, True)
    assert place.division.at_work == 2
    one = PlaceOnDevices.of(4, demands, [1.0] * 3, offer(3.0, host=8.0, speeds=(1.0,)))
    assert (one.choice.kind, one.division.ends) == (Offload.NONE, (7,))
    none = PlaceOnDevices.of(4, demands, [1.0] * 3, offer(0.1, 0.1, host=0.1))
    assert not none.fits
    assert none.division.at_work == 2, "by speed alone"


def test_workers_on_the_processor_have_one_memory_together() -> None:
    demands = [PlaceDemand(numbers=BLOCK.numbers)] * 2
    memory = Offered(device=int(1.5 * GIB), disk=8 * GIB, kinds=tuple(Offload))
    both = Offer(memory=memory, rooms=(memory.device,) * 2, speeds=(1.0, 1.0))
    place = PlaceOnDevices.of(0, demands, [1.0, 1.0], both)
    assert (place.choice.kind, place.fits, place.division.ends) == (Offload.DISK, True, (1, 2))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(Path(tmp_path_factory.mktemp("devices")))


def test_microbatches_are_as_many_as_the_fullest_device_has_room_for(run: RunDirectory) -> None:
    entries = run.manifest.blocks
    specs = [run.block_spec(entry) for entry in entries]
    demands = [demand_of(run.manifest, entry) for entry in entries]
    flops = [float(entry.flops_forward) for entry in entries]

    def most(given: Offer) -> int:
        place = PlaceOnDevices.of(0, demands, flops, given)
        held = place.held(specs, 1, given)
        assert [spec.index for spec in held.specs] == [spec.index for spec in specs]
        return held.most

    large, small = offer(1.0, 1.0, host=1.0), offer(1.0, 0.02, host=1.0)
    assert most(small) < most(large)
    assert most(offer(1.0, host=1.0, speeds=(1.0,))) < most(large), "all blocks on one device"
    shared = Offer(
        memory=Offered(device=GIB), main=MainMemory(limit=GIB), rooms=(GIB, GIB), speeds=(1.0, 1.0)
    )
    assert most(shared) < most(Offer(memory=Offered(device=GIB), main=MainMemory(limit=GIB))), (
        "bundles pass in between"
    )
