"""Swarms of devices that differ, in the papers' settings as far as they describe them, drawn anew for each
seed.

What a paper does not give, and is chosen here, is in NOT_GIVEN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType

import numpy as np

from benchmarks.scenarios.networks import BEST, dt_fm
from hetpeer.peer.planning.model_workload import PRESETS, Gpt, preset
from hetpeer.stages.planning.swarms.plan_inputs import Compression, Devices, StepDemand

GIGA, TERA, GIB = 1e9, 1e12, float(1 << 30)
V100, SLOWER = 6.0 * TERA, 1.55
RTX_4090, RTX_2080 = 0.4 * 82.6 * TERA, 0.4 * 10.1 * TERA
RATIO = 100.0 / 3.0
"""FusionLLM's Top-K with ratio 100: of a hundred numbers one is left, which takes the bytes of three, as
its index has 64 bits.
"""
Floats = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """Devices in the order in which people would write them down, machine by machine and region by region,
    and their work.
    """

    devices: Devices
    work: StepDemand


def fusionllm(number: int, seed: int) -> Testbed:
    """Testbed 1 (24 GPUs: one machine of 8 RTX 4090 and four of 4 RTX 2080) or 2 (two and eight): GPT-2
    XL, two microbatches of three sequences. Slow lines compress as far as it helps (AdaTopK, Eq. 7),
    whoever plans.
    """
    random = np.random.default_rng([seed, number])
    machines = [8] * number + [4] * (4 * number)
    flops = [RTX_4090] * (8 * number) + [RTX_2080] * (16 * number)
    memory = [24.0] * (8 * number) + [11.0] * (16 * number)
    compression = Compression(forward=RATIO, backward=RATIO, adaptive=True)
    work = replace(_scaled(preset(PRESETS["gpt2-xl"], 2), 3), compression=compression)
    return Testbed(
        devices=_machines(random, machines, flops, memory, mbps=(8.0, 1.0), latency_ms=(30.0, 0.6)), work=work
    )


def hps(case: int, seed: int, count: int = 16) -> Testbed:
    """Case 1 to 3 of Table 2: 16 GPUs, batches of 512 in microbatches of 4. Or more of them, by fours."""
    random = np.random.default_rng([seed, 100 + case])
    flops, memory = np.full(count, V100), np.full(count, 32.0)
    albert = preset(Gpt(layers=12, width=4096, vocabulary=30_000, context=512), 128)
    work = _scaled(albert, 4)
    if case == 3:
        flops[count // 2 :] /= SLOWER
        memory[count // 2 :] = 11.0
    low, high = {1: (16.0, 16.0), 2: (8.0, 24.0), 3: (0.05, 0.3)}[case]
    nearest, farthest = {1: (0.1, 0.1), 2: (10.0, 100.0), 3: (100.0, 150.0)}[case]
    machine = np.arange(count) // 4
    same = machine[:, None] == machine[None, :]
    gbit_s = _alike(random.uniform(low, high, (count, count)))
    latency_ms = _alike(random.uniform(nearest, farthest, (count, count)))
    if case > 1:
        gbit_s, latency_ms = np.where(same, 16.0, gbit_s), np.where(same, 0.1, latency_ms)
    return Testbed(devices=_devices(flops, memory * GIB, gbit_s, latency_ms), work=work)


def networks(name: str, seed: int) -> Testbed:
    """One of DT-FM's five, whose devices differ in speed by a tenth or so (lognormal); GPT-3 1.3B, 64
    microbatches.
    """
    network, random = dt_fm(name), np.random.default_rng(seed)
    flops = V100 * np.exp(random.normal(0.0, 0.1, len(network)))
    return Testbed(
        devices=_devices(
            flops, np.full(len(network), 32 * GIB), network.bandwidth_gbit_s, 1e3 * network.latency_s
        ),
        work=preset(PRESETS["gpt3-1.3b"], 64),
    )


def homes(seed: int) -> Testbed:
    """Two dozen homes: GPUs from 2 to 40 TFLOP/s, uplinks around 20 Mbit/s (lognormal), a GPT-2 of medium
    size.
    """
    random, count = np.random.default_rng([seed, 7]), 24
    up = 0.02 * np.exp(random.normal(0.0, 0.7, count))
    apart = random.uniform(10.0, 60.0, (count, count))
    devices = _devices(
        TERA * np.exp(random.uniform(np.log(2.0), np.log(40.0), count)),
        GIB * random.choice([4.0, 8.0, 12.0, 24.0], count),
        np.broadcast_to(up[:, None], (count, count)).copy(),
        _alike(apart),
    )
    return Testbed(devices=replace(devices, uplink=up * GIGA / 8), work=preset(PRESETS["gpt2-medium"], 32))


KINDS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        **{f"FusionLLM {number}": ("fusionllm", number) for number in (1, 2)},
        **{f"HPS {case}": ("hps", case) for case in (1, 2, 3)},
        **{f"DT-FM {name}": ("networks", number) for number, name in enumerate(BEST)},
        "homes": ("homes", 0),
    }
)
"""Name → which function makes it, and its first argument."""
NOT_GIVEN: Mapping[str, str] = MappingProxyType(
    {
        "fusionllm": "lines but as pictures (here between machines lognormal around 8 Mbit/s and 30 ms, "
        "within one 64 Gbit/s), what its GPUs reach (here 40 % of what their makers say),"
        " how far sums of gradients are compressed (here not)",
        "hps": "which devices are the slow ones (here the last eight), how long a microbatch takes (here a "
        "V100 reaches 6 TFLOP/s; an RTX 2080 takes 55 % longer, as it says), ALBERT's activations,"
        " how it is cut, how parameters that layers share are added up (here twelve layers of width 4096, "
        "each with its own)",
        "networks": "any computing (here GPT-3 1.3B on V100s that reach 6 TFLOP/s and differ by a tenth), "
        "microbatches (here 64)",
    }
)
"""Function of KINDS → what the paper (arXiv 2410.12707, HPS, DT-FM) leaves out.

HPS' case 4 is case 3 with departures (benchmarks/churn.py, benchmarks/departures.py).
"""


def testbed(name: str, seed: int) -> Testbed:
    """The testbed of a name in KINDS."""
    kind, number = KINDS[name]
    match kind:
        case "fusionllm":
            return fusionllm(number, seed)
        case "hps":
            return hps(number, seed)
        case "networks":
            return networks(list(BEST)[number], seed)
        case _:
            return homes(seed)


def _machines(
    random: np.random.Generator,
    sizes: list[int],
    flops: list[float],
    memory_gib: list[float],
    *,
    mbps: tuple[float, float],
    latency_ms: tuple[float, float],
) -> Devices:
    """GPUs of one machine are next to each other; lines between machines are lognormal (middle, width),
    directed in bandwidth.
    """
    machine = np.array(list(chain.from_iterable([n] * size for n, size in enumerate(sizes))))
    between, count = (len(sizes), len(sizes)), len(machine)
    gbit_s = 1e-3 * mbps[0] * np.exp(random.normal(0.0, mbps[1], between))
    apart = _alike(latency_ms[0] * np.exp(random.normal(0.0, latency_ms[1], between)))
    same = machine[:, None] == machine[None, :]
    index = np.ix_(machine, machine)
    assert count == len(flops) == len(memory_gib)
    return _devices(
        np.array(flops),
        GIB * np.array(memory_gib),
        np.where(same, 64.0, gbit_s[index]),
        np.where(same, 0.05, apart[index]),
    )


def _devices(flops: Floats, memory: Floats, gbit_s: Floats, latency_ms: Floats) -> Devices:
    """Only pairs are known: an uplink is as fast as the fastest line that leaves it."""
    bandwidth, latency = gbit_s * GIGA / 8, latency_ms / 1e3
    np.fill_diagonal(bandwidth, 0.0)
    np.fill_diagonal(latency, 0.0)
    return Devices(
        flops=flops, memory=memory, uplink=bandwidth.max(axis=1), latency=latency, bandwidth=bandwidth
    )


def _alike(matrix: Floats) -> Floats:
    """The same both ways."""
    upper = np.triu(matrix, 1)
    alike: Floats = upper + upper.T
    return alike


def _scaled(work: StepDemand, sequences: int) -> StepDemand:
    """So many sequences a microbatch."""
    return replace(
        work, flops=work.flops * sequences, kept=work.kept * sequences, crossing=work.crossing * sequences
    )
