"""What a machine offers to a run: what its owner's limits leave of what there is, and what the worker found to compute on."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from hetpeer.peer.watching.human_units import bytes_text
from hetpeer.stages.block import device
from hetpeer.stages.ipc.results import WorkerInfo

RESERVED, LEAST_RESERVED_BYTES = 0.05, 256 << 20
"""Of a GPU's memory, for what no plan counts: kernels and their scratch space, and gaps between tensors."""


def ram_offered(limit: float) -> int:
    """Bytes; `limit` is a number of them, or up to 1 a share of what is free now."""
    return int(limit) if limit > 1 else int(device.survey().ram_free_bytes * limit)


def disk_offered(home: Path, limit: float) -> int:
    """As `ram_offered`, of the disk that `home` is on."""
    return int(limit) if limit > 1 else int(shutil.disk_usage(home).free * limit)


def memory_offered(ram: int, info: WorkerInfo, gpu_memory: float) -> int:
    """Bytes that a place may take of this worker: `ram`, and on a GPU no more than what is free there of the share `gpu_memory`. Pure.

    Parameters, slots and activations are on the GPU then; what travels is in RAM, as is a state that is loaded.
    """
    if not on_gpu(info):
        return ram
    total, held = info.device_total_bytes, info.device_bytes
    free = min(
        info.device_free_bytes + held, int(total * gpu_memory)
    )  # what torch holds after a warm-up is used again
    reserved = max(LEAST_RESERVED_BYTES, int(total * RESERVED))
    return min(ram, max(free - reserved, 1))  # 0 would be: not known


def uplink_offered(measured: float, limit: float) -> float:
    """Bytes/s: what was `measured` (0: nothing was), and no more than `limit`; 0: neither is known. Pure."""
    known = min(measured or math.inf, limit)
    return known if known < math.inf else 0.0


def on_gpu(info: WorkerInfo) -> bool:
    """Whether the worker computes on one."""
    return info.device != "cpu"


def computes_on(info: WorkerInfo, offered: int) -> str:
    """As a line for the owner; `offered` as `memory_offered` says. Pure."""
    cores = "1 processor core" if info.threads == 1 else f"{info.threads} processor cores"
    free = bytes_text(info.device_free_bytes + info.device_bytes)
    there = f"{info.device_name}, {free} free" if on_gpu(info) else cores
    return f"computes on {there}; offers {bytes_text(offered)} of memory"
