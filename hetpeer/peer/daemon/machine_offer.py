"""A machine's offer to a place: memory of its devices, main memory and disk, within the owner's limits."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.limits.amounts import bytes_text, share, share_or_bytes
from hetpeer.peer.limits.settings import Settings
from hetpeer.peer.training.volunteer_figures import MainMemory, ProcessorPart, memory_text
from hetpeer.peer.transport.tensor_schema import BUNDLES, MOST_BUNDLES
from hetpeer.stages.block import device
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.ipc.worker_messages import WorkerInfo
from hetpeer.stages.pipeline.division import sure_room
from hetpeer.stages.pipeline.place_memory import Offered, PlaceDemand, kinds_of

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_ARITHMETIC = 200
"""Characters of that text in the event log (bootstrap/log/evidence.py)."""
RESERVED, LEAST_RESERVED_BYTES = 0.05, 256 << 20
"""Share and least bytes of GPU memory that are not offered: for kernels, scratch space and fragmentation."""
P2PD_BYTES = 96 << 20
"""Bytes that p2pd takes: 64 MiB at first, and more with each peer."""
GROWTH_BYTES = 160 << 20
"""Bytes by which daemon and a worker may grow: freed memory kept by malloc (MALLOC of worker_process.py),
records of the run.
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
        """Bytes of main memory: a number, but no more than is free now, or a share of that."""
        free = device.survey().ram_free_bytes
        return min(_within(share_or_bytes(self.ram), free), free)

    def ram_wanted(self) -> int:
        """Bytes of main memory that the owner allows by a number; 0: a share of what is free."""
        limit = share_or_bytes(self.ram)
        return int(limit) if limit > 1 else 0

    def disk_bytes(self, folder: Path) -> int:
        """Bytes of the disk that has `folder`, likewise."""
        return _within(share_or_bytes(self.disk), shutil.disk_usage(folder).free)

    def rooms(self, infos: Sequence[WorkerInfo], main: MainMemory) -> list[int]:
        """Bytes that a place may take on the device of each worker, with this main memory. Pure.

        Workers on the processor share one memory. Beside a GPU they have half of what is offered of it.
        """
        place = _for_place(main)
        on_cpu = sum(not on_gpu(info) for info in infos)
        part = place if on_cpu == len(infos) else max(place // (2 * max(on_cpu, 1)), 1)
        return [device_offered(info, share(self.gpu_memory)) if on_gpu(info) else part for info in infos]

    def gpu_bytes(self, infos: Sequence[WorkerInfo], main: MainMemory) -> int:
        """Bytes of the workers' rooms that are memory of GPUs; main memory bounds none of them. Pure."""
        rooms = zip(self.rooms(infos, main), infos, strict=True)
        return sum(room for room, info in rooms if on_gpu(info))

    def beside_gpus(self, infos: Sequence[WorkerInfo], main: MainMemory) -> int:
        """Bytes of main memory that are rooms of workers beside a GPU. Pure."""
        rooms = zip(self.rooms(infos, main), infos, strict=True)
        return sum(room for room, info in rooms if not on_gpu(info)) if any(map(on_gpu, infos)) else 0

    def offered(
        self, infos: Sequence[WorkerInfo], main: MainMemory, disk: int, blocks: Sequence[PlaceDemand] = ()
    ) -> Offered:
        """Memory for a place with workers like `infos`, of this main memory and disk. Pure.

        Of several devices so much counts that any place of the run's `blocks` can be divided among them.
        """
        rooms, kinds, place = self.rooms(infos, main), kinds_of(self.offload), _for_place(main)
        if not any(map(on_gpu, infos)):
            return Offered(device=place, disk=disk, kinds=kinds)
        return Offered(
            device=sure_room(rooms, _largest(blocks, kinds, max(rooms))),
            host=max(place - self.beside_gpus(infos, main), 1),
            disk=disk,
            kinds=kinds,
        )


def _for_place(main: MainMemory) -> int:
    """Bytes of main memory for places: a part of it is for bundles."""
    return main.for_model - min(int(main.for_model * BUNDLES), MOST_BUNDLES)


def _largest(blocks: Sequence[PlaceDemand], kinds: Sequence[Offload], room: int) -> int:
    """Bytes of the largest block on a device, with the kind of offload that takes most of those that fit."""
    sizes = [
        max((block.room(kind, apart=True, spills=False).device for block in blocks), default=0)
        for kind in kinds
    ]
    return max((size for size in sizes if size <= room), default=min(sizes))


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


def main_memory(limit: int, infos: Sequence[WorkerInfo]) -> MainMemory:
    """`limit` bytes, divided between the program with warm workers like `infos`, and models.

    Raises `LocalError` HP-MEM-004 if the program takes them all.
    """
    daemon = psutil.Process().memory_info().rss
    workers = sum(info.rss_bytes + GROWTH_BYTES for info in infos)
    main = MainMemory(limit=limit, program=daemon + workers + P2PD_BYTES)
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


def rate_offered(measured: float, limit: float) -> float:
    """Bytes/s of one direction of the line: as `measured` (0: it was not), and no more than `limit`. Pure.

    0: neither is known.
    """
    known = min(measured or math.inf, limit)
    return known if known < math.inf else 0.0


def on_gpu(info: WorkerInfo) -> bool:
    """Whether the worker computes on one."""
    return info.device != "cpu"


def processor_of(infos: Sequence[WorkerInfo], boot_id: str, cores: int, quota: float) -> ProcessorPart:
    """The processor of the workers: a GPU by its own id, else the processor of this boot. Pure.

    `quota`: processors that this process may use; infinite if it is not limited.

    Several devices are not known to be shared as a whole, and a boot id may not be had.
    """
    if len(infos) != 1:
        return ProcessorPart()
    (info,) = infos
    if on_gpu(info):
        return ProcessorPart(info.device_uuid, 1.0) if info.device_uuid else ProcessorPart()
    return ProcessorPart(boot_id, min(1.0, min(info.threads, quota) / cores)) if boot_id else ProcessorPart()


def boot_id() -> str:
    """The id of this boot of the kernel, which its containers have in common; empty if it has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def computes_on(infos: Sequence[WorkerInfo], main: MainMemory, offered: Offered) -> str:
    """Line for the owner: devices and offered memory. Pure."""
    return f"computes on {' + '.join(map(_device_text, infos))}; offers {memory_text(offered)} ({main})"


def _device_text(info: WorkerInfo) -> str:
    if not on_gpu(info):
        return "1 processor core" if info.threads == 1 else f"{info.threads} processor cores"
    return f"{info.device_name}, {bytes_text(info.device_free_bytes + info.device_bytes)} free"


def device_names(infos: Sequence[WorkerInfo]) -> str:
    """`2 x A10 + cpu`: kinds of devices, and how many of each. Pure."""
    counted = Counter(info.device_name for info in infos)
    return " + ".join(name if count == 1 else f"{count} x {name}" for name, count in counted.items())


def arithmetics(infos: Sequence[WorkerInfo]) -> str:
    """Text of what decides the last bits on any of the devices, as the event log takes it. Pure."""
    return " + ".join(dict.fromkeys(info.arithmetic for info in infos))[:MAX_ARITHMETIC]
