"""benchmarks/real_size.py on a small model, and its reading of memory."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.proportional_memory import MIB, VolunteerMemory
from benchmarks.real_size import measure, parsed

SMALL = (
    *("--layers=2", "--width=64", "--heads=4", "--context=64", "--vocabulary=512", "--text-mib=1"),
    *("--steps=8", "--kill-at=3", "--absent=1", "--checkpoint-every=2", "--ram-limit=2GiB", "--trace"),
)
HOLDS = "held = bytearray({size}); held[::4096] = b'1' * len(held[::4096]); print(flush=True); input()"


@pytest.mark.proof
@pytest.mark.swarm
async def test_a_small_model_of_the_benchmark_learns_as_one_process(tmp_path: Path) -> None:
    figures = await measure(parsed([*SMALL, "--replay"]), tmp_path)
    met = figures["goals"]
    assert met["held-out loss as one process's"], figures["difference"]
    assert met["every microbatch once"]
    assert met["computed again, bit for bit"]
    assert met["memory within --ram-limit"]
    assert figures["parameters"] == 136_960
    swarm = figures["swarm"]
    assert swarm["held_out"] < swarm["held_out_at_first"] - 0.1
    assert swarm["rollbacks"] >= 1, "the killed volunteer was the only holder of its blocks"
    assert len(figures["one_process"]["step_s"]) == 8
    assert len(swarm["step_s"]) >= 8
    for number, memory in swarm["memory"].items():
        assert all(mib > 10 for mib in memory["largest_mib"].values())
        assert memory["all_mib"] <= sum(memory["largest_mib"].values()) + 1
        assert swarm["busy_s_per_step"][number]["compute: Backward"] > 0


def test_memory_is_added_up_and_the_largest_is_kept() -> None:
    holding = [
        subprocess.Popen(
            (sys.executable, "-c", HOLDS.format(size=size)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for size in (64 * MIB, 32 * MIB)
    ]
    for one in holding:
        assert one.stdout is not None
        one.stdout.readline()
    parts = dict(zip(("volunteer", "worker"), (psutil.Process(one.pid) for one in holding), strict=True))
    memory = VolunteerMemory()
    memory.look(parts)
    for one in holding:
        one.communicate(b"\n")
    memory.look(parts)
    assert 64 < memory.largest["daemon"] / MIB < 90
    assert 32 < memory.largest["worker"] / MIB < 58
    assert memory.largest["p2pd"] == 0
    assert memory.all == memory.largest["daemon"] + memory.largest["worker"]
    assert memory.looks == 2
