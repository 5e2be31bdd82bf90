"""The compute workers of a volunteer: their start, the offer that follows from it, and their rests.

The machine offers the run what the owner's limits leave of its memory, disk and uplink.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.step_workload import demand_of
from hetpeer.peer.daemon.limits_in_force import LOOK_S, LimitsInForce
from hetpeer.peer.daemon.machine_offer import (
    OwnersLimits,
    arithmetics,
    boot_id,
    computes_on,
    device_names,
    main_memory,
    processor_of,
    rate_offered,
)
from hetpeer.peer.limits.amounts import bytes_text, rate, share
from hetpeer.peer.limits.settings import WORKER, Settings
from hetpeer.peer.probing.kept_line import KeptLine
from hetpeer.peer.process.console import say
from hetpeer.peer.process.home import Home
from hetpeer.peer.training.volunteer_figures import Offer
from hetpeer.stages.block.processor_quota import quota
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc.compute import Compute, ComputeConfig

MIN_ARENA_BYTES = 1 << 26
PACE_S = 0.7
"""Period of work and rest under a power limit: far below a lease, out of phase with power readings."""


async def start_compute(
    home: Home, governing: LimitsInForce, manifest: Manifest, life: contextlib.AsyncExitStack
) -> tuple[Compute, Offer, str]:
    """Start compute workers; returns them, the offer to the run and the devices' names.

    Raises `LocalError` HP-GPU-*, and HP-MEM-004 if main memory is too little for the program itself.
    """
    settings = governing.settings
    limits = OwnersLimits.of(settings)
    ram, disk = limits.ram_bytes(), limits.disk_bytes(home.path)
    compute = await life.enter_async_context(_running_compute(settings, ram, home.path, disk))
    try:
        speeds = tuple(done.flops_per_second for done in await compute.submit_to_each(c.WarmUp()))
        infos = await compute.infos()
    except asyncio.CancelledError:
        compute.suspend()
        raise
    uuids = tuple(info.device_uuid for info in infos if info.device_uuid)
    governing.computes_on(settings.compute.device, uuids)
    main = main_memory(ram, infos)
    memory = limits.offered(infos, main, disk, [demand_of(manifest, block) for block in manifest.blocks])
    if ram < limits.ram_wanted():
        say(f"only {bytes_text(ram)} of main memory are free, and limits.ram allows {limits.ram}")
    say(computes_on(infos, main, memory))
    offer = Offer(
        memory=memory,
        main=main,
        flops_per_second=sum(speeds),
        rooms=tuple(limits.rooms(infos, main)),
        beside_gpus=limits.beside_gpus(infos, main),
        gpu_bytes=limits.gpu_bytes(infos, main),
        speeds=speeds,
        name=settings.node.name,
        arithmetic=arithmetics(infos),
        choice=settings.compute.offload,
        processor=processor_of(infos, boot_id(), os.cpu_count() or 1, quota()),
    )
    return compute, with_line(offer, KeptLine.load(home.path), settings), device_names(infos)


def with_line(offer: Offer, line: KeptLine, settings: Settings) -> Offer:
    """`offer` with what `line` carries within the owner's limits. Pure."""
    return replace(
        offer,
        uplink=rate_offered(line.uplink, rate(settings.limits.up)),
        downlink=rate_offered(line.downlink, rate(settings.limits.down)),
    )


@contextlib.asynccontextmanager
async def _running_compute(settings: Settings, ram: int, folder: Path, disk: int) -> AsyncIterator[Compute]:
    """Context with a compute worker, ended at its end."""
    config = ComputeConfig(
        device=settings.compute.device,
        threads=settings.threads,
        nice=settings.limits.nice,
        gpu_memory=share(settings.limits.gpu_memory),
        arena_bytes=max(ram, MIN_ARENA_BYTES),
        folder=folder,
        disk_bytes=disk,
    )
    compute = await Compute.start(config, WORKER)
    try:
        yield compute
    finally:
        await compute.close()


async def pace_forever(compute: Compute, share: Callable[[], float]) -> None:
    """Let the worker rest for the part of each PACE_S that `share` leaves. Never returns."""
    while True:
        working_s = PACE_S * share()
        await asyncio.sleep(working_s if working_s < PACE_S else LOOK_S)
        if working_s < PACE_S:
            compute.rest()
            try:
                await asyncio.sleep(PACE_S - working_s)
            finally:
                compute.wake()
