"""A machine's offer to a place: memory of its device, main memory and disk, within the owner's limits."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hetpeer.peer.limits.amounts import bytes_text, share, share_or_bytes
from hetpeer.peer.limits.settings import Settings
from hetpeer.peer.training.volunteer_figures import memory_text
from hetpeer.peer.transport.tensor_schema import BUNDLES
from hetpeer.stages.block import device
from hetpeer.stages.ipc.worker_messages import WorkerInfo
from hetpeer.stages.pipeline.place_memory import Offered, kinds_of

RESERVED, LEAST_RESERVED_BYTES = 0.05, 256 << 20
"""Share and least bytes of GPU memory that are not offered: for kernels, scratch space and fragmentation."""


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

    def offered(self, info: WorkerInfo, ram: int, disk: int) -> Offered:
        """Memory for a place with a worker like `info`, of these bytes of main memory and disk. Pure."""
        return Offered(
            device=device_offered(info, share(self.gpu_memory)) if on_gpu(info) else ram,
            host=host_offered(ram) if on_gpu(info) else 0,
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


def host_offered(ram: int) -> int:
    """Bytes of main memory that a place may take beside a GPU: bundles have a share of `ram`. Pure."""
    return max(ram - int(ram * BUNDLES), 1)  # 0 would be: the device computes in main memory


def uplink_offered(measured: float, limit: float) -> float:
    """Bytes/s: what was `measured` (0: nothing was), and no more than `limit`; 0: neither is known. Pure."""
    known = min(measured or math.inf, limit)
    return known if known < math.inf else 0.0


def on_gpu(info: WorkerInfo) -> bool:
    """Whether the worker computes on one."""
    return info.device != "cpu"


def computes_on(info: WorkerInfo, offered: Offered) -> str:
    """Line for the owner: device and offered memory. Pure."""
    cores = "1 processor core" if info.threads == 1 else f"{info.threads} processor cores"
    free = bytes_text(info.device_free_bytes + info.device_bytes)
    there = f"{info.device_name}, {free} free" if on_gpu(info) else cores
    return f"computes on {there}; offers {memory_text(offered)}"
