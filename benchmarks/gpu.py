"""Promises that hold on a CPU, tried on a GPU: the model table, bf16, the optimizer's bits, masks, bundles, a
worker killed at work, a place divided among two devices, a swarm.

Forward and backward of every model of tests/stages/zoo.py, cut into three stages, on the CPU and on the
device, TF32 off; what it costs to run a model as a graph there (seconds of the clock, with what is queued on
the device); and a swarm of which not all have a GPU. Without a GPU it says so and measures nothing; `--device
cpu` runs the same steps on a CPU, to test this file.

    python -m benchmarks.gpu
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import pynvml
import torch
from torch import nn

from benchmarks import gpudevices, gpulanes, gpuswarm, overhead, report
from hetpeer.averaging.optim.update_rules import rule_of
from hetpeer.examples.gpt import GPT
from hetpeer.peer.daemon.machine_offer import device_offered, on_gpu
from hetpeer.peer.limits.settings import WORKER
from hetpeer.stages.block import device as devices
from hetpeer.stages.block.exact_numerics import squared_norm
from hetpeer.stages.ipc.block_commands import Info, WarmUp
from hetpeer.stages.ipc.compute import Compute, ComputeConfig
from hetpeer.stages.ipc.worker_process import WorkerDiedError
from hetpeer.stages.operators import philox, random_draws
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import balanced_ranges, cut_blocks
from tests.stages.split_run import Outcome, split_step
from tests.stages.zoo import ZOO, zoo

STAGES = 3
GOAL, BF16_GOAL = 1e-4, 1e-2
ROUNDS = 9
LARGE: Mapping[str, Callable[[], tuple[nn.Module, overhead.Data]]] = {
    "GPT, width 2048, 8 layers, 8 x 512 tokens": lambda: (
        GPT(2048, 8, 16, 512, 1000),
        overhead.text(8, 512, 1000),
    )
}
"""Cases that keep a GPU busy; those of benchmarks.overhead do not."""


def differences(one: Outcome, other: Outcome) -> dict[str, float]:
    """Largest relative difference of the loss, of any gradient and of any running value, by their largest
    elements.
    """

    def apart(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))

    return {
        "loss": apart(one.loss, other.loss),
        "gradients": max(apart(one.gradients[n], g) for n, g in other.gradients.items()),
        "statistics": max((apart(one.statistics[n], s) for n, s in other.statistics.items()), default=0.0),
    }


def compare_model(name: str, device: torch.device) -> dict[str, Any]:
    """One row of the table: float32 against the CPU, bf16 against float32."""
    _, dag, microbatches = zoo(name)
    rows: dict[str, Any] = {}
    blocks = cut_blocks(dag)
    blocks = blocks if len(blocks) >= STAGES else cut_blocks(dag, STAGES)
    ranges = balanced_ranges(blocks, STAGES)
    on_cpu = split_step(blocks, ranges, dag.tensors, microbatches)
    rows["float32"] = differences(split_step(blocks, ranges, dag.tensors, microbatches, device), on_cpu)
    half = cut_blocks(dag, len(blocks), ComputeMode(autocast=True))
    rows["bf16 loss"] = differences(split_step(half, ranges, dag.tensors, microbatches, device), on_cpu)[
        "loss"
    ]
    rows["met"] = all(value <= GOAL for value in rows["float32"].values()) and rows["bf16 loss"] <= BF16_GOAL
    return rows


def equal_bits(device: torch.device) -> dict[str, bool]:
    """Whether numbers that holders compare by hash have equal bits: the update, the norm, the masks."""
    generator = torch.Generator().manual_seed(0)
    rule = rule_of({"name": "AdamW", "eps": 1e-8, "learning_rate": 1e-3, "weight_decay": 0.1})
    vectors = [torch.randn(1_000_003, generator=generator) for _ in range(4)]
    vectors[2].abs_()
    names = ("parameters", "exp_avg", "exp_avg_sq", "gradient")
    updated = []
    for place in (torch.device("cpu"), device):
        mine = dict(zip(names, (vector.clone().to(place) for vector in vectors), strict=True))
        for step in (1, 2, 3):
            rule.apply(
                parameters=mine["parameters"],
                state=mine,
                gradient=mine["gradient"],
                coefficient=0.37,
                update=step,
                step=step,
            )
        updated.append([mine[name].cpu() for name in names])
    draw = random_draws.Draw(seed=7, step=100, microbatch=3, microbatches=8)
    drawn = torch.from_numpy(random_draws.keep_mask(draw, 5, 0.1, 100_001))
    return {
        "optimizer": all(a.equal(b) for a, b in zip(*updated, strict=True)),
        "squared norm": squared_norm(vectors[0]) == squared_norm(vectors[0].to(device)),
        "dropout masks": philox.keep_mask(draw, 5, 0.1, 100_001, device).cpu().equal(drawn),
    }


def graph_overhead(device: torch.device) -> dict[str, dict[str, float]]:
    """The cases of benchmarks.overhead, by the clock."""

    def clock() -> float:
        gpulanes.wait(device)
        return time.perf_counter()

    cases = overhead.CASES if device.type == "cpu" else {**overhead.CASES, **LARGE}
    found = {}
    for name, make in cases.items():
        torch.manual_seed(0)
        found[name] = overhead.measure(ROUNDS, overhead.opponents(*make(), device), clock)
    return found


async def kill_at_work(device: str) -> dict[str, Any]:
    """SIGKILL while the worker multiplies matrices; a new one must find the device as it was."""
    worker = await Compute.start(ComputeConfig(device=device), WORKER)
    pid = (await worker.submit(Info()), worker.workers[0].pid)[1]
    work = asyncio.ensure_future(worker.submit(WarmUp()))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    try:
        await work
        noticed = False
    except WorkerDiedError:
        noticed = True
    await worker.close()
    other = await Compute.start(ComputeConfig(device=device), WORKER)
    info = await other.submit(Info())
    speed = (await other.submit(WarmUp())).flops_per_second
    await other.close()
    return {"noticed": noticed, "device": info.device_name, "tflops_float32": round(speed / 1e12, 2)}


async def offered(device: str) -> dict[str, Any]:
    """Whether NVML knows the worker's GPU by what the worker calls it, and whether what a volunteer offers
    of that can be had.
    """
    worker = await Compute.start(ComputeConfig(device=device), WORKER)
    await worker.submit(WarmUp())
    info = await worker.submit(Info())
    await worker.close()
    nbytes = device_offered(info, 1.0)
    if not on_gpu(info):
        return {"known": True, "had": True}
    try:
        pynvml.nvmlInit()
        pynvml.nvmlDeviceGetHandleByUUID(info.device_uuid)
        known = True
    except pynvml.NVMLError:
        known = False
    torch.cuda.empty_cache()  # this process has used it, too
    try:
        torch.empty(nbytes, dtype=torch.uint8, device=device)
        had = True
    except torch.OutOfMemoryError:
        had = False
    torch.cuda.empty_cache()
    return {"known": known, "had": had, "gib": round(nbytes / 2**30, 1)}


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if report.without_gpu(options.device):
        return 0
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = devices.pick(options.device)
    models = {name: compare_model(name, device) for name in ZOO}
    bits, lanes = equal_bits(device), gpulanes.measure(device)
    costs = graph_overhead(device)
    offer = asyncio.run(offered(options.device))
    killed = asyncio.run(kill_at_work(options.device))
    divided = asyncio.run(gpudevices.measure(options.device))
    swarm = asyncio.run(gpuswarm.train(options.device, options.seed))
    rows = (*models.values(), lanes, divided, swarm)
    met = all(row["met"] for row in rows) and all(bits.values()) and killed["noticed"]
    met = met and offer["known"] and offer["had"]
    figures = {
        "device": devices.name_of(device),
        "models": models,
        "bits": bits,
        "lanes": lanes,
        "overhead": costs,
        "offered": offer,
        "killed": killed,
        "divided": divided,
        "swarm": swarm,
        "met": met,
    }
    if device.type == "cuda":
        return report.finish("gpu", figures, options, show)
    show(figures)  # a rehearsal on the CPU leaves no file
    return 0 if met else 1


def show(figures: dict[str, Any]) -> None:
    print(f"{figures['device']} against the CPU, float32 without TF32; bf16 against float32")
    for name, row in figures["models"].items():
        parts = ", ".join(f"{what} {value:.1e}" for what, value in row["float32"].items())
        print(f"  {name:20} {parts}; bf16 loss {row['bf16 loss']:.1e}{'' if row['met'] else '  MISSED'}")
    print(
        "  equal bits: "
        + ", ".join(f"{what} {'yes' if ok else 'NO'}" for what, ok in figures["bits"].items())
    )
    lanes = figures["lanes"]
    same = ", ".join(name for name, equal in lanes["equal bytes"].items() if equal)
    print(
        f"  bundles: same bytes as on the CPU by {same};"
        f" {lanes['encoding on the CPU against it']:.1f}x as fast as there; copies "
        f"{lanes['copy_gbytes_s']:.1f} GB/s,"
        f" {lanes['copies against pageable']:.2f}x those from pageable memory; encoding beside products takes"
        f" {lanes['together_over_in_turns']:.2f} of one after the other"
    )
    for name, row in lanes["selection"].items():
        missed = "" if row["against topk"] >= 1 and row["as on the CPU"] else "  MISSED"
        print(f"  the largest {name}: {row['against topk']:.2f}x as fast as topk{missed}")
    print(
        f"  a look at {gpulanes.PARAMETERS} gradients: {lanes['look_s'] * 1e3:.2f} ms; one by one "
        f"{lanes['looks one by one against it']:.1f}x as long"
    )
    for name, row in figures["overhead"].items():
        print(
            f"  as a graph: {name}: {row['blocks_s']:.4f} s, eager {row['eager_s']:.4f} s, ratio "
            f"{row['ratio']}"
        )
    print(f"  of its memory a volunteer offers: {figures['offered']}")
    print(f"  a worker killed at work: {figures['killed']}")
    divided = figures["divided"]
    print(
        f"  a place divided among {' and '.join(divided['devices'])}, {divided['blocks']} blocks: losses and "
        f"states as one after the other{'' if divided['met'] else '  MISSED'}"
    )
    swarm = figures["swarm"]
    print(
        f"  a swarm with one volunteer killed and one on a CPU: {swarm['steps']} of {gpuswarm.STEPS} steps, "
        "losses apart by"
        f" {swarm['loss difference']:.1e}{'' if swarm['met'] else '  MISSED'}"
    )
    for line in (*swarm["problems"], *swarm["unconfined"]):
        print(f"    {line}")


if __name__ == "__main__":
    sys.exit(main())
