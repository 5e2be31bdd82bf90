"""Do heartbeats stay on time while everything else is busy?

Two processes push `--bytes` to each other in 4 MiB frames, both directions at once. Beside them run `--nodes`
DHT nodes, each with a p2pd of its own, that store a signed record every second. The two exchange a ping and
pong ten times a second on a stream of its own. A heartbeat's lag runs from when the ping was *due* to its
pong, so a stalled event loop counts in full.

    python -m benchmarks.heartbeat --bytes 2000000000 --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from hetpeer.dht.base.runtime import dying_with_us

BULK, BEAT = "bench/1/bulk", "bench/1/beat"
FRAME_BYTES = 4 << 20
BEAT_PERIOD_S = 0.1
STORE_PERIOD_S = 1.0
DEADLINE_S = 900.0
GOAL_P99_S = 0.25


def summary(samples_s: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(samples_s)
    if not ordered:
        return {"count": 0}

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3, 2)

    return {"count": len(ordered), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0)}


async def start_node(folder: Path, name: str, peers: list[str]) -> Any:
    from hetpeer.dht.identity.addresses import parse_address
    from hetpeer.dht.identity.peer_identity import Identity
    from hetpeer.dht.node.node import Node, NodeConfig

    return await Node.start(
        NodeConfig(peers=tuple(map(parse_address, peers))), Identity.create(folder / name)
    )


async def told() -> str:
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


async def swarm(folder: Path, count: int) -> None:
    """`count` DHT nodes in this process, each with its own p2pd."""
    from hetpeer.dht.discovery import Advert, Roster

    nodes = [await start_node(folder, "node-0", [])]
    for n in range(1, count):
        nodes.append(await start_node(folder, f"node-{n}", nodes[0].addresses()))
    print(json.dumps({"addresses": nodes[0].addresses()}), flush=True)
    latencies: list[float] = []

    async def store_for_ever(number: int, node: Any) -> None:
        roster = Roster(node, "bench")
        step = 0
        while True:
            step += 1
            began = time.perf_counter()
            await roster.publish(Advert(name=f"node-{number}", step=step))
            latencies.append(time.perf_counter() - began)
            await asyncio.sleep(max(0.0, STORE_PERIOD_S - latencies[-1]))

    stores = [asyncio.create_task(store_for_ever(n, node)) for n, node in enumerate(nodes)]
    await told()
    for store in stores:
        store.cancel()
    seen = len(await Roster(nodes[-1], "bench").read())
    print(json.dumps({"store": summary(latencies), "adverts_seen": seen}), flush=True)
    await asyncio.gather(*(node.close() for node in nodes))


async def pusher(folder: Path, name: str, peers: list[str], total: int) -> None:
    """One of the two: answers beats, takes bulk, and sends both to the other."""
    node = await start_node(folder, name, peers)
    received = asyncio.Event()

    async def take(stream: Any) -> None:
        target, left = bytearray(FRAME_BYTES), total
        while left:
            frame = await stream.receive()
            await stream.receive_into(memoryview(target)[: frame.payload_length])
            left -= frame.payload_length
        await stream.send({"done": True})
        received.set()

    async def answer(stream: Any) -> None:
        while True:
            await stream.send((await stream.receive()).header)

    await node.serve(BULK, take)
    await node.serve(BEAT, answer)
    print(json.dumps({"peer_id": node.peer_id}), flush=True)
    other = await told()
    lags: list[float] = []

    async def beat() -> None:
        async with await node.open(other, BEAT) as stream:
            due = time.perf_counter()
            while True:
                due += BEAT_PERIOD_S
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await stream.send({"due": due})
                await stream.receive()
                lags.append(time.perf_counter() - due)

    async def push() -> float:
        block, left = memoryview(os.urandom(FRAME_BYTES)), total
        async with await node.open(other, BULK) as stream:
            began = time.perf_counter()
            while left:
                chunk = block[: min(left, FRAME_BYTES)]
                await stream.send({}, chunk)
                left -= len(chunk)
            await stream.receive()
            return time.perf_counter() - began

    beating = asyncio.create_task(beat())
    await asyncio.sleep(2.0)
    idle, lags[:] = summary(lags), []
    cpu_before, seconds = time.process_time(), await push()
    busy = summary(lags)
    await received.wait()
    beating.cancel()
    print(json.dumps({
        "idle": idle, "busy": busy, "seconds": seconds, "megabytes_per_s": round(total / seconds / 1e6, 1),
        "cpu_s": round(time.process_time() - cpu_before, 2),
    }), flush=True)  # fmt: skip
    await told()
    await node.close()


class Child:
    """One role of this file in its own process, spoken to by lines."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "benchmarks.heartbeat", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=dying_with_us(),  # noqa: PLW1509 - it takes no lock
        )

    async def report(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), DEADLINE_S)
        if not line:
            raise SystemExit("a process of the benchmark died; its error stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


async def measure(folder: Path, total: int, nodes: int) -> dict[str, Any]:
    children = [Child("--role=swarm", f"--folder={folder}", f"--nodes={nodes}")]
    try:
        addresses = (await children[0].report())["addresses"]
        arguments = [f"--folder={folder}", f"--bytes={total}", f"--peers={addresses[0]}"]
        children += [Child(f"--role={name}", *arguments) for name in ("left", "right")]
        _, left, right = children
        ids = [(await child.report())["peer_id"] for child in (left, right)]
        left.tell(ids[1])
        right.tell(ids[0])
        pushers = await asyncio.gather(left.report(), right.report())
        for child in children:
            child.tell()
        dht = await children[0].report()
        for child in children:
            child.process.wait(timeout=30)
    finally:
        for child in children:
            child.process.kill()
            child.process.wait()
    worst = max(one["busy"].get("p99_ms", float("inf")) for one in pushers)
    return {
        "bytes_each_way": total, "nodes": nodes, "load_1min": os.getloadavg()[0],
        "left": pushers[0], "right": pushers[1], "dht": dht, "met": worst <= GOAL_P99_S * 1e3,
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    print(
        f"{result['bytes_each_way'] / 1e9:g} GB each way beside {result['nodes']} DHT nodes, "
        f"{os.cpu_count()} cpus"
    )
    for name in ("left", "right"):
        one = result[name]
        for state in ("idle", "busy"):
            lag = one[state]
            print(
                f"  {name:5} {state}: lag p50 {lag.get('p50_ms')} p99 {lag.get('p99_ms')} max "
                f"{lag.get('max_ms')} ms ({lag['count']} beats)"
            )
        print(
            f"  {name:5} sent {one['megabytes_per_s']} MB/s in {one['seconds']:.1f} s, {one['cpu_s']} s of "
            "cpu in Python"
        )
    print(
        f"  DHT store p50 {result['dht']['store'].get('p50_ms')} p99 {result['dht']['store'].get('p99_ms')} "
        f"ms, {result['dht']['adverts_seen']} adverts seen"
    )
    print(f"  goal p99 <= {GOAL_P99_S * 1e3:.0f} ms: {'met' if result['met'] else 'NOT met'}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--bytes", type=int, default=2_000_000_000, help="to push in each direction")
    parser.add_argument("--nodes", type=int, default=8)
    for internal in ("--role", "--folder", "--peers"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    options = parser.parse_args()
    import uvloop

    if options.role == "swarm":
        uvloop.run(swarm(Path(options.folder), options.nodes))
        return 0
    if options.role:
        uvloop.run(pusher(Path(options.folder), options.role, options.peers.split(","), options.bytes))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder), options.bytes, options.nodes))
    return report.finish("heartbeat", result, options, show)


if __name__ == "__main__":
    sys.exit(main())
