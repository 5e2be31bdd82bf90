"""What a machine offers: its RAM, or what a GPU has less than that."""

import math

import pytest

from hetpeer.peer.daemon.volunteer_life import computes_on, memory_offered, uplink_offered
from hetpeer.stages.ipc.worker_messages import WorkerInfo

MIB, GIB = 1 << 20, 1 << 30


def worker(device: str, free: float, total: float, held: float = 0.0, threads: int = 1) -> WorkerInfo:
    """Memory in GiB."""
    return WorkerInfo(
        device=device,
        device_name="cpu" if device == "cpu" else "A10",
        device_uuid="" if device == "cpu" else "GPU-1",
        threads=threads,
        rss_bytes=0,
        device_bytes=int(held * GIB),
        device_free_bytes=int(free * GIB),
        device_total_bytes=int(total * GIB),
        blocks=(),
        tasks=0,
    )


@pytest.mark.parametrize(
    ("ram", "free", "total", "held", "share", "offered"),
    [
        (32.0, 5.5, 6.0, 0.0, 1.0, 5.2),  # 0.3 GiB for what no plan counts
        (32.0, 4.5, 6.0, 1.0, 1.0, 5.2),  # what torch keeps after its warm-up it uses again
        (32.0, 5.5, 6.0, 0.0, 0.5, 2.7),
        (32.0, 2.0, 6.0, 0.0, 0.5, 1.7),  # somebody else has the rest
        (3.0, 5.5, 6.0, 0.0, 1.0, 3.0),
        (32.0, 1.75, 2.0, 0.0, 1.0, 1.5),  # a quarter of a GiB at least
    ],
)
def test_on_a_gpu_what_is_free_there(
    ram: float, free: float, total: float, held: float, share: float, offered: float
) -> None:
    found = memory_offered(int(ram * GIB), worker("cuda:0", free, total, held), share)
    assert math.isclose(found / GIB, offered, abs_tol=1e-6)


def test_a_gpu_without_memory_offers_next_to_none() -> None:
    """Not nothing, which would mean that it is not known."""
    assert memory_offered(GIB, worker("cuda:0", 0.1, 6.0), 1.0) == 1


def test_on_a_processor_ram_alone_counts() -> None:
    assert memory_offered(3 * GIB, worker("cpu", 1.0, 2.0), 0.1) == 3 * GIB


@pytest.mark.parametrize(
    ("info", "line"),
    [
        (worker("cuda:1", 21.5, 24.0, 0.5), "computes on A10, 22 GiB free; offers 512 MiB of memory"),
        (worker("cpu", 8.0, 16.0), "computes on 1 processor core; offers 512 MiB of memory"),
        (worker("cpu", 8.0, 16.0, threads=2), "computes on 2 processor cores; offers 512 MiB of memory"),
    ],
)
def test_the_owner_is_told_what_computes(info: WorkerInfo, line: str) -> None:
    assert computes_on(info, 512 * MIB) == line


def test_an_uplink_is_offered_as_it_was_measured_and_within_its_limit() -> None:
    assert uplink_offered(0.0, math.inf) == 0.0
    assert uplink_offered(2e6, math.inf) == 2e6
    assert uplink_offered(2e6, 1e6) == 1e6
    assert uplink_offered(0.0, 1e6) == 1e6
