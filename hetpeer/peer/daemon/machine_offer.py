"""A machine's offer to a place: memory of its device, main memory and disk, within the owner's limits."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.limits.amounts import bytes_text, share, share_or_bytes
from hetpeer.peer.limits.settings import Settings
from hetpeer.peer.training.volunteer_figures import MainMemory, memory_text
from hetpeer.peer.transport.tensor_schema import BUNDLES, MOST_BUNDLES
from hetpeer.stages.block import device
from hetpeer.stages.ipc.worker_messages import WorkerInfo
from hetpeer.stages.pipeline.place_memory import Offered, kinds_of

RESERVED, LEAST_RESERVED_BYTES = 0.05, 256 << 20
"""Share and least bytes of GPU memory that are not offered: for kernels, scratch space and fragmentation."""
P2PD_BYTES = 96 << 20
"""What p2pd takes: 64 MiB at first, and more with each peer."""
GROWTH_BYTES = 160 << 20
"""What daemon and worker may grow by: freed memory that malloc keeps (stages/ipc/compute.py, MALLOC), records
of the run.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnersLimits:
    """The settings that limit memory and disk, as texts."""

    ram: str
    gpu_memory: str
    disk: str
    offload: str

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Those of all settings."""
        return cls.by(lambda key: str(settings.flat()[key]))

    @classmethod
    def by(cls, value: Callable[[str], str]) -> Self:
        """From the `value` of each setting's `section.key`."""
        return cls(
            ram=value("limits.ram"),
            gpu_memory=value("limits.gpu_memory"),
            disk=value("limits.disk"),
            offload=value("compute.offload"),
        )

    def ram_bytes(self) -> int:
        """Bytes of main memory: a number, or a share of what is free now."""
        return _within(share_or_bytes(self.ram), device.survey().ram_free_bytes)

    def disk_bytes(self, folder: Path) -> int:
        """Bytes of the disk that has `folder`, likewise."""
        return _within(share_or_bytes(self.disk), shutil.disk_usage(folder).free)

    def offered(self, info: WorkerInfo, main: MainMemory, disk: int) -> Offered:
        """Memory for a place with a worker like `info`, of this main memory and disk. Pure."""
        place = main.for_model - min(int(main.for_model * BUNDLES), MOST_BUNDLES)
        return Offered(
            device=device_offered(info, share(self.gpu_memory)) if on_gpu(info) else place,
            host=place if on_gpu(info) else 0,
            disk=disk,
            kinds=kinds_of(self.offload),
        )


def _within(limit: float, free: int) -> int:
    """Bytes; `limit` is a number of them, or up to 1 a share of those that are `free`."""
    return int(limit) if limit > 1 else int(free * limit)


def device_offered(info: WorkerInfo, gpu_memory: float) -> int:
    """Bytes of a GPU that a place may take: the free part of the share `gpu_memory`. Pure."""
    total, held = info.device_total_bytes, info.device_bytes
    # what torch holds after a warm-up is used again
    free = min(info.device_free_bytes + held, int(total * gpu_memory))
    reserved = max(LEAST_RESERVED_BYTES, int(total * RESERVED))
    return max(free - reserved, 1)  # 0 would be: not known


def main_memory(limit: int, info: WorkerInfo) -> MainMemory:
    """`limit` bytes, divided between the program with a warm worker like `info`, and models.

    Raises `LocalError` HP-MEM-004 if the program takes them all.
    """
    daemon = psutil.Process().memory_info().rss
    main = MainMemory(limit=limit, program=daemon + info.rss_bytes + P2PD_BYTES + GROWTH_BYTES)
    if not main.for_model:
        raise LocalError(
            "HP-MEM-004",
            f"a limit of {bytes_text(limit)} of main memory is too little for hetpeer itself",
            why=f"daemon, compute worker and p2pd take {bytes_text(main.program)} before they hold anything"
            " of a model",
            fix="allow more (--ram-limit), or close other programs if the limit is a share of what is free",
            exit_code=ExitCode.TOO_SMALL,
        )
    return main


def uplink_offered(measured: float, limit: float) -> float:
    """Bytes/s: what was `measured` (0: nothing was), and no more than `limit`; 0: neither is known. Pure."""
    known = min(measured or math.inf, limit)
    return known if known < math.inf else 0.0


def on_gpu(info: WorkerInfo) -> bool:
    """Whether the worker computes on one."""
    return info.device != "cpu"


def computes_on(info: WorkerInfo, main: MainMemory, offered: Offered) -> str:
    """Line for the owner: device and offered memory. Pure."""
    cores = "1 processor core" if info.threads == 1 else f"{info.threads} processor cores"
    free = bytes_text(info.device_free_bytes + info.device_bytes)
    there = f"{info.device_name}, {free} free" if on_gpu(info) else cores
    return f"computes on {there}; offers {memory_text(offered)} ({main})"
