"""Resources of this machine: memory, cores, GPU, speed of matrix products, and efficiency on real operators.

Torch is imported inside the functions that need it, so that the daemon may ask for RAM and cores cheaply.
Only the compute worker touches a GPU.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.block.processor_quota import quota, stopwatch

if TYPE_CHECKING:
    import torch

WARM_UP_S = 0.25
"""Seconds of measuring. The first product and the last one come on top: about a second in all."""

WARM_UP_LARGEST = 8192
"""Rows of the largest matrix: 256 MiB in float32, and enough to fill a large GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResources:
    """Memory in bytes (free: available without swapping) and cores that this process may use."""

    ram_bytes: int
    ram_free_bytes: int
    cores: int


def survey() -> HostResources:
    """The resources that this process may use; a container's limits count."""
    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    for limit, used in _cgroup_memory(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")):
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return HostResources(ram_bytes=total, ram_free_bytes=free, cores=len(os.sched_getaffinity(0)))


def _old_cache(stat: Path) -> int:
    """Bytes of cached files that a control group has not used lately; 0 if it does not say."""
    lines = stat.read_text().splitlines() if stat.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _cgroup_memory(root: Path, membership: Path) -> list[tuple[int, int]]:
    """(limit, used) in bytes of this process's control group and those above (cgroup v2), if limited.

    Cached files that nobody has read for a while count as free, as they do outside of groups.
    """
    if not membership.is_file():
        return []
    line = next((text for text in membership.read_text().splitlines() if text.startswith("0::")), "0::/")
    group = root / line.removeprefix("0::").lstrip("/")
    found = []
    for directory in (group, *group.parents):
        if not directory.is_relative_to(root):
            break
        limit, used = directory / "memory.max", directory / "memory.current"
        if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
            found.append((int(text), int(used.read_text()) - _old_cache(directory / "memory.stat")))
    return found


def pick(name: str) -> torch.device:
    """The device called `name`: `cpu`, `cuda`, `cuda:1`, or `auto` for a GPU if there is one.

    Raises `LocalError` HP-GPU-002 if this machine does not have it.
    """
    import torch

    available = gpus()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    kind, _, index = "cuda:0".partition(":") if name == "auto" else name.partition(":")
    if kind == "cuda" and (index or "0").isdecimal() and int(index or 0) < available:
        return torch.device("cuda", int(index or 0))
    raise LocalError(
        "HP-GPU-002",
        f"there is no device {name!r}",
        why=f"torch {torch.__version__} sees {available} CUDA devices",
        fix="use --device cpu, or mend the driver",
        exit_code=ExitCode.NO_DEVICE,
    )


def gpus() -> int:
    """Number of CUDA devices that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def name_of(device: torch.device) -> str:
    """Product name of a GPU; `cpu` for the processor."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def uuid_of(device: torch.device) -> str:
    """A GPU's `GPU-…` id in the driver and NVML, whatever its number here; empty for the processor."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


def memory_of(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of the GPU, or of RAM."""
    import torch

    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    machine = survey()
    return machine.ram_free_bytes, machine.ram_bytes


def measure_flops(
    device: torch.device, seconds: float = WARM_UP_S, dtype: torch.dtype | None = None
) -> float:
    """Matrix-product speed in FLOP/s, by default of float32: the best of as many products as fit into
    `seconds`, as fast as the processor quota lets them follow one another (processor_quota.py).

    The best, since slower ones show what else the machine did. Raises RuntimeError if torch has no product of
    that dtype there.
    """
    import torch

    size, best = 256, 0.0
    processors = math.inf if device.type == "cuda" else quota()
    matrix = torch.ones(size, size, device=device, dtype=dtype or torch.float32)
    product = matrix @ matrix  # wakes the library up; not counted
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        taken_s = stopwatch(processors)
        torch.mm(matrix, matrix, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        duration = taken_s()
        best = max(best, 2 * size**3 / duration)
        if (
            size < WARM_UP_LARGEST and 16 * duration < seconds / 4
        ):  # one of twice the size, and a bit, still fits
            size *= 2
            try:
                matrix = torch.ones(size, size, device=device, dtype=matrix.dtype)
                product = torch.empty_like(matrix)
            except torch.OutOfMemoryError:  # a small share of a small GPU
                break
    return best


def efficiency(flops: float, seconds: float, flops_per_second: float) -> float:
    """λ of a device on blocks whose `flops` took `seconds` (FusionLLM, arXiv 2410.12707, section 3.5).

    λ is the fraction of the speed of its matrix product, `flops_per_second`, that real operators get.
    """
    return flops / (seconds * flops_per_second)
