"""Offer of a machine to a run: what the owner's limits leave of its memory, disk and uplink, and its
device.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from hetpeer.peer.watching.human_units import bytes_text
from hetpeer.stages.block import device
from hetpeer.stages.ipc.worker_messages import WorkerInfo

RESERVED, LEAST_RESERVED_BYTES = 0.05, 256 << 20
"""Share and least bytes of a GPU's memory that are not offered: kernels, scratch space and gaps between
tensors.
"""


def ram_offered(limit: float) -> int:
    """Bytes; `limit` is a number of them, or up to 1 a share of what is free now."""
    return int(limit) if limit > 1 else int(device.survey().ram_free_bytes * limit)


def disk_offered(home: Path, limit: float) -> int:
    """Bytes of the disk of `home`; `limit` is a number of them, or up to 1 a share of what is free now."""
    return int(limit) if limit > 1 else int(shutil.disk_usage(home).free * limit)


def memory_offered(ram: int, info: WorkerInfo, gpu_memory: float) -> int:
    """Bytes that a place may take: `ram`, and on a GPU at most the free part of the share `gpu_memory`. Pure.

    On a GPU parameters, slots and activations lie there; tensors in transit and a state being loaded are in
    RAM.
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
    """Line for the owner: device and offered memory, `offered` as from `memory_offered`. Pure."""
    cores = "1 processor core" if info.threads == 1 else f"{info.threads} processor cores"
    free = bytes_text(info.device_free_bytes + info.device_bytes)
    there = f"{info.device_name}, {free} free" if on_gpu(info) else cores
    return f"computes on {there}; offers {bytes_text(offered)} of memory"
