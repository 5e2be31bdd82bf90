"""All checks of `hetpeer doctor` in their order: quick ones first, then those that start something.

The latter start the network process and the compute worker, and meet the run's peers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from hetpeer.bootstrap.run.durable_files import temporary_folder
from hetpeer.dht.base.errors import HetpeerError, LocalError, RemoteError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.kademlia.first_contact import JoinAnswer, say_hello
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.p2pd.p2pd_control import P2pdControl
from hetpeer.dht.p2pd.p2pd_process import P2pd
from hetpeer.peer.arrival.destinations import Destination
from hetpeer.peer.arrival.manifest_fetch import fetch_manifest
from hetpeer.peer.checkup import local_checks, thresholds
from hetpeer.peer.checkup.findings import Finding, Grade
from hetpeer.peer.checkup.local_checks import Owner, battery, idle, port, settings, version_of
from hetpeer.peer.checkup.thresholds import Verdict
from hetpeer.peer.daemon.machine_offer import device_names, on_gpu
from hetpeer.peer.limits import nvml
from hetpeer.peer.limits.amounts import flops_text
from hetpeer.peer.limits.sensors import only_cpu
from hetpeer.peer.limits.settings import WORKER
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc.compute import ALL, Compute, ComputeConfig
from hetpeer.stages.ipc.worker_messages import WorkerInfo


async def examine(home: Path, goal: Destination | None) -> AsyncIterator[Finding]:
    """Yield each finding as soon as it is known. Writes nothing but a nameless probe file.

    `goal`: peers to meet as well. Takes a few seconds, mostly for the compute worker and for peers that do
    not answer.
    """
    owner = await asyncio.to_thread(Owner.of, home)
    checks: dict[str, Callable[[], Verdict]] = {
        "software": local_checks.software,
        "memory": local_checks.memory,
        "sharing": local_checks.shared_memory,
        "files": local_checks.open_files,
        "clock": local_checks.clock,
        "home": lambda: local_checks.folder(home),
        "identity": lambda: local_checks.identity(home),
        "daemon": lambda: local_checks.daemon(home),
        "service": local_checks.service,
        "settings": lambda: settings(owner),
        "port": lambda: port(owner),
        "idle": lambda: idle(owner),
        "battery": lambda: battery(owner),
    }
    for check, look in checks.items():
        yield await judged(check, _at_once(look))
    yield await judged("network", network_process())
    if goal is None:
        how = "hetpeer doctor INVITE shows whether the run's peers answer and reach this machine"
        yield Finding(check="peers", grade=Grade.SKIP, text=f"not checked: {how}")
    else:
        async for finding in meet(goal, owner.value("network.host"), owner.port):
            yield finding
    try:
        infos, speed = await workers(_devices(owner.value("compute.device")))
    except HetpeerError as error:
        yield Finding(check="device", grade=Grade.FAIL, error=error)
        return
    yield await judged("device", device(infos, speed))
    yield await judged("place", _at_once(lambda: local_checks.place(owner, home, infos)))


def _devices(asked: str) -> str:
    """The devices to look at: several GPUs if the owner has `asked` for them, else the best one."""
    return asked if asked == ALL or ("," in asked and not only_cpu(asked)) else "auto"


async def _at_once(look: Callable[[], Verdict]) -> Verdict:
    return look()


async def network_process() -> Verdict:
    """Whether p2pd starts and listens. Raises `LocalError` HP-NET-003, HP-DISK-*."""
    with temporary_folder("doctor") as folder:
        begin = time.monotonic()
        p2pd = await P2pd.start(NodeConfig(), Identity.create(folder / "identity.key"), port=0)
        await p2pd.close()
    return f"the network process (p2pd) starts in {time.monotonic() - begin:.1f} s"


async def workers(devices: str) -> tuple[list[WorkerInfo], float]:
    """The compute workers' words on themselves after a warm-up as in `hetpeer join`, and their FLOP/s.

    Raises `LocalError` HP-GPU-001, HP-GPU-002, HP-GPU-003, and what the worker says of its device.
    """
    compute = await Compute.start(ComputeConfig(device=devices), WORKER)
    try:
        done = await compute.submit_to_each(c.WarmUp())
        return await compute.infos(), sum(one.flops_per_second for one in done)
    finally:
        await compute.close()


async def device(infos: Sequence[WorkerInfo], speed: float) -> Verdict:
    """On which devices the workers compute and how fast, or why on no GPU."""
    gpus = await asyncio.to_thread(nvml.gpus)
    return thresholds.device(
        device_names(infos),
        on_cpu=not any(map(on_gpu, infos)),
        speed=f"{flops_text(speed)}/s",
        torch=version_of("torch"),
        gpus=gpus,
    )


async def meet(goal: Destination, host: str, port: int) -> AsyncIterator[Finding]:
    """Findings from joining `goal`'s network for a moment, with a new identity, at `host`:`port` (0: any)."""
    with temporary_folder("doctor") as folder:
        identity = Identity.create(folder / "identity.key")
        config = NodeConfig(host=host, port=port, peers=goal.addresses, reachability="ask")
        try:
            node = await Node.start(config, identity)
        except LocalError as error:
            yield Finding(check="peers", grade=Grade.FAIL, error=error)
            return
        try:
            yield await judged("peers", _peers(node, goal))
            yield await judged("reach", _at_once(lambda: thresholds.reach(node.reach_estimate)))
            yield await judged("run", _run(node, goal))
        finally:
            await node.close()


async def judged(check: str, look: Awaitable[Verdict]) -> Finding:
    """The verdict of a check, or the error that it raised, as a finding."""
    try:
        verdict = await look
    except HetpeerError as error:
        return Finding(check=check, grade=Grade.FAIL, error=error)
    if isinstance(verdict, str):
        return Finding(check=check, grade=Grade.OK, text=verdict)
    return Finding(check=check, grade=Grade.WARN, error=verdict)


async def _peers(node: Node, goal: Destination) -> Verdict:
    """Whether the named peers answer, and the difference of our clocks."""
    control = (await node.session()).control
    peers = list(dict.fromkeys(address.peer_id for address in goal.addresses))
    answers = await asyncio.gather(*(_hello(control, peer) for peer in peers))
    hellos = [answer for answer in answers if isinstance(answer, JoinAnswer)]
    silent = [answer for answer in answers if isinstance(answer, RemoteError)]
    if not hellos:
        raise silent[0]
    if silent:
        return silent[0]
    apart = max(abs(hello.clock_offset_s) for hello in hellos)
    many = f"all {len(hellos)} answer" if len(hellos) > 1 else "it answers"
    return f"{many}; the clocks differ by {1000 * apart:.0f} ms at most"


async def _hello(control: P2pdControl, peer: str) -> JoinAnswer | RemoteError:
    try:
        return await say_hello(control, SystemClock(), peer)
    except RemoteError as error:
        return error


async def _run(node: Node, goal: Destination) -> Verdict:
    """Raises as `fetch_manifest` does."""
    try:
        signed = (await fetch_manifest(node, goal.addresses, goal.run)).signed
    except LocalError as error:
        if goal.run or error.code != "HP-NET-006":
            raise
        return error  # a rendezvous serves no run itself
    return f"{signed.manifest.name}, {signed.run_id}: its manifest is sound"
