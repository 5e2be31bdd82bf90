"""What the papers compute is what the planner computes where their assumptions hold: FusionLLM (Tang et
al., arXiv 2410.12707), HPS (the hybrid of parameter servers and pipelines, with reliable and unreliable
devices) and Ravnest (Menon et al., arXiv 2401.01728). DT-FM's Eq. 1 to 4 are in test_planning_grids.py.
Each formula stands here as its paper has it, in plain loops.
"""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.links.adaptive_ratio import ratio_of
from hetpeer.stages.planning.swarms import pipeline_cuts as planner
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts
from hetpeer.stages.planning.swarms.plan_inputs import Compression, Devices, StepDemand
from hetpeer.stages.planning.swarms.plan_search import PlanSearch
from hetpeer.stages.planning.swarms.swarm_plan import SwarmPlan, planned
from tests.stages.aims import target_of
from tests.stages.test_planning_living import roomy, turns
from tests.stages.test_planning_swarms import some_devices, some_work

SEEDS, STAGES, MICROBATCHES = st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 20)
BLOCKS = 9


def one_way(seed: int, stages: int) -> tuple[Devices, StepDemand, tuple[int, ...], tuple[int, ...]]:
    """A pipeline whose lines take time for what goes on alone, as in the papers' forward pass; a device
    sends by its lines, and no uplink divides them.
    """
    random = np.random.default_rng(seed)
    devices, work = roomy(some_devices(stages, seed)), some_work(BLOCKS, seed)
    order = tuple(random.permutation(stages).tolist())
    cuts = (0, *sorted((random.permutation(BLOCKS - 1)[: stages - 1] + 1).tolist()), BLOCKS)
    latency, bandwidth = devices.latency.copy(), devices.bandwidth.copy()
    for sender, receiver in pairwise(order):
        latency[receiver, sender], bandwidth[receiver, sender] = 0.0, math.inf
    devices = replace(devices, uplink=np.full(stages, math.inf), latency=latency, bandwidth=bandwidth)
    return devices, work, order, cuts


def computing(devices: Devices, work: StepDemand, order, cuts) -> list[float]:
    """C_p of each stage: FLOPs of its operators over the device's speed.

    FusionLLM counts the forward pass; here the backward, of twice the FLOPs, counts as well.
    """
    found = []
    for device, begin, end in zip(order, cuts, cuts[1:], strict=False):
        flops = 0.0
        for block in range(begin, end):
            flops += 3 * work.flops[block]
        found.append(flops / devices.flops[device])
    return found


def sending(devices: Devices, work: StepDemand, order, cuts, *, latency: bool = True) -> list[float]:
    """R_p of each stage: alpha + M beta to the next one; nothing behind the last."""
    found = []
    for place in range(len(order) - 1):
        sender, receiver = order[place], order[place + 1]
        alpha = devices.latency[sender, receiver] if latency else 0.0
        found.append(alpha + work.crossing[cuts[place + 1]] / devices.bandwidth[sender, receiver])
    return [*found, 0.0]


def plan_of(devices: Devices, work: StepDemand, order, cuts) -> SwarmPlan:
    made = PipelineCuts(devices, work).at(order, cuts)
    assert made is not None
    return planned(devices, work, [made])


# ── FusionLLM ───────────────────────────────────────────────────────────────────────────────────────────────


@given(SEEDS, STAGES, MICROBATCHES)
def test_fusionllm_eq_3_a_pipeline_takes_one_microbatch_and_the_slowest_stage_for_each_of_the_others(
    seed, stages, microbatches
):
    """T = sum over p of (C_p + R_p) + (n_b - 1) max over p of max(C_p, R_p).

    Differs on purpose: a line is not busy while a byte travels, so alpha is in the first term alone; the
    paper has it in both.
    """
    devices, work, order, cuts = one_way(seed, stages)
    work = replace(work, microbatches=microbatches)
    busy = computing(devices, work, order, cuts)
    there = sending(devices, work, order, cuts)
    carried = sending(devices, work, order, cuts, latency=False)
    fill = sum(c + r for c, r in zip(busy, there, strict=True))
    slowest = max(max(c, r) for c, r in zip(busy, carried, strict=True))
    found = plan_of(devices, work, order, cuts)
    assert found.sync_s == 0.0
    assert math.isclose(found.total_s, fill + (microbatches - 1) * slowest, rel_tol=1e-9)
    paper = fill + (microbatches - 1) * max(max(c, r) for c, r in zip(busy, there, strict=True))
    assert found.total_s <= paper * (1 + 1e-9)


@given(SEEDS, STAGES)
def test_fusionllm_eq_3_with_what_comes_back(seed, stages):
    """What the paper's forward pass leaves out costs as much again: lines that are alike both ways, and
    gradients as large as activations, make R_p twice as long in the first term, and no longer in the
    second, since both ways go at once.
    """
    devices, work, order, cuts = one_way(seed, stages)
    devices = replace(
        devices,
        latency=devices.latency + devices.latency.T,
        bandwidth=np.minimum(devices.bandwidth, devices.bandwidth.T),
    )
    busy = computing(devices, work, order, cuts)
    there = sending(devices, work, order, cuts)
    carried = sending(devices, work, order, cuts, latency=False)
    fill = sum(c + 2 * r for c, r in zip(busy, there, strict=True))
    slowest = max(max(c, r) for c, r in zip(busy, carried, strict=True))
    found = plan_of(devices, work, order, cuts)
    assert math.isclose(found.total_s, fill + (work.microbatches - 1) * slowest, rel_tol=1e-9)


def eq_7(seconds: list[float], ratio: float) -> list[float]:
    """FusionLLM, Eq. 7 (AdaTopK): of how many numbers one is kept on each link, r_e = max(1, 3 r R_e / max
    R).
    """
    return [max(1.0, 3 * ratio * one / max(seconds)) for one in seconds]


@given(st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=8), st.floats(1.0, 200.0))
def test_fusionllm_eq_7_slow_links_are_compressed_in_proportion(links, ratio):
    """A kept number takes the bytes of three (float32, and an index of 64 bits), so r_e makes a link r_e /
    3 times smaller; `ratio_of` counts bytes.

    Differs on purpose: where the paper's Top-K makes a bundle larger (r_e < 3), it is sent as it is; and
    where computing takes time, links are compressed no further than to be hidden behind it
    (test_links_adaptive.py).
    """
    target = target_of(links, [0.0], ratio)
    for seconds, kept in zip(links, eq_7(links, ratio), strict=True):
        assert math.isclose(ratio_of(seconds, target, ratio), max(1.0, kept / 3), rel_tol=1e-9)


@given(SEEDS, st.integers(2, 5), MICROBATCHES, st.floats(1.0, 100.0))
def test_fusionllm_eq_8_a_pipeline_whose_links_are_compressed(seed, stages, microbatches, ratio):
    """T = sum over p of (C_p + 3 R_p / r_p) + (n_b - 1) max over p of max(C_p, 3 R_p / r_p), with r_p of
    Eq. 7. (The paper divides max(C_p, R_p) by r_p; computing is not compressed.)

    Equal where computing is free, nothing has a latency, and lines may take all of the period. Differs on
    purpose: `SLACK` leaves half of it, so that adaptive lines go further in the first term; and what Top-K
    would make larger is sent as it is.
    """
    devices, work, order, cuts = one_way(seed, stages)
    devices = replace(devices, latency=np.zeros_like(devices.latency))
    adaptive = Compression(forward=ratio, adaptive=True)
    work = replace(work, flops=np.full(BLOCKS, 1e-6), compression=adaptive, microbatches=microbatches)
    dense = sending(devices, work, order, cuts)
    compressed = [min(r, 3 * r / kept) for r, kept in zip(dense, eq_7(dense, ratio), strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "SLACK", 1.0)
        found = plan_of(devices, work, order, cuts)
    paper = sum(compressed) + (microbatches - 1) * max(compressed)
    assert math.isclose(found.total_s, paper, rel_tol=1e-9)
    assert plan_of(devices, work, order, cuts).total_s <= paper * (1 + 1e-9)


# ── HPS ─────────────────────────────────────────────────────────────────────────────────────────────────────


def eq_1(devices: Devices, work: StepDemand, order, cuts) -> list[float]:
    """HPS, Eq. 1: DT_k, the longest that a server of stage k waits for a client.

    With one client a stage and no server between, nothing is sent inside a stage, and what is left is t |h_k|
    / c.
    """
    return computing(devices, work, order, cuts)


@given(SEEDS, STAGES, MICROBATCHES, st.booleans())
def test_hps_eq_1_and_2_a_batch_takes_its_slowest_stage_for_each_microbatch(
    seed, stages, microbatches, free_lines
):
    """PT = d max over k of (hop forward + hop back + DT_k): d microbatches, and no filling, as its steps
    overlap. Equal to our steps that overlap where only one of computing and sending takes time, and a
    device sends both ways by one uplink.

    Differs on purpose: a stage that computes and sends does both at once here, one after the other in the
    paper, so ours is PT at most and half of it at least.
    """
    devices, work, order, cuts = one_way(seed, stages)
    lines = np.full((stages, stages), math.inf)
    both = replace(roomy(some_devices(stages, seed)), bandwidth=lines, latency=np.zeros((stages, stages)))
    one = replace(both, uplink=devices.uplink) if free_lines else replace(both, flops=both.flops * 1e20)
    work = replace(work, microbatches=microbatches, staleness=50)

    def paper(of: Devices) -> float:
        slowest = 0.0
        for place, waited in enumerate(eq_1(of, work, order, cuts)):
            forward = work.crossing[cuts[place + 1]] / of.uplink[order[place]]
            back = work.crossing[cuts[place]] / of.uplink[order[place]]
            slowest = max(slowest, forward + back + waited)
        return microbatches * slowest

    assert math.isclose(plan_of(one, work, order, cuts).total_s, paper(one), rel_tol=1e-6)
    ours = plan_of(both, work, order, cuts).total_s
    assert paper(both) / 2 * (1 - 1e-9) <= ours <= paper(both) * (1 + 1e-9)


# ── Ravnest ─────────────────────────────────────────────────────────────────────────────────────────────────


def enough_ram(memory: list[float], order: tuple[int, ...], peak: float) -> bool:
    """Ravnest: the RAM of a cluster's nodes together is at least what the model takes at its peak."""
    total = 0.0
    for device in order:
        total += memory[device]
    return total >= peak


@given(SEEDS, STAGES, st.floats(0.3, 2.0))
def test_ravnest_a_cluster_has_the_ram_of_the_whole_model(seed, stages, part):
    """With one microbatch under way, and a model of blocks so small that they can be cut anywhere, it is
    enough as well, but for a block a device.

    Differs on purpose: ours is a limit for every device (FusionLLM, Eq. 6), and counts the microbatches that
    a stage keeps.
    """
    blocks = 100
    devices = some_devices(stages, seed)
    work = replace(
        some_work(blocks, seed),
        constants=np.full(blocks, part * devices.memory.sum() / blocks),
        kept=np.zeros(blocks),
        crossing=np.zeros(blocks + 1),
        microbatches=1,
    )
    order, peak = tuple(range(stages)), float(work.memory.sum())
    fits = PipelineCuts(devices, work).best(order) is not None
    if fits:
        assert enough_ram(devices.memory.tolist(), order, peak * (1 - 1e-9))
    spare = [memory - work.memory[0] for memory in devices.memory]
    if enough_ram(spare, order, peak) and min(spare) >= 0:
        assert fits


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_ravnest_stages_are_as_large_as_their_ram(stages):
    """Ravnest cuts the model in proportion to RAM; ours in proportion to speed, which is the same where
    whoever computes faster has as much more RAM.
    """
    blocks = 1000
    memory = np.random.default_rng(stages).uniform(1.0, 4.0, stages)
    devices = replace(
        some_devices(stages, 0), memory=1e12 * memory, flops=1e12 * memory, uplink=np.full(stages, 1e30)
    )
    devices = replace(devices, bandwidth=np.full((stages, stages), 1e30))
    work = replace(some_work(blocks, 0), flops=np.full(blocks, 1e9), crossing=np.zeros(blocks + 1))
    found = PipelineCuts(devices, work).best(tuple(range(stages)))
    assert found is not None
    for device, (begin, end) in enumerate(pairwise(found.cuts)):
        assert abs((end - begin) - blocks * memory[device] / memory.sum()) <= stages


def imbalance(devices: Devices, clusters) -> float:
    """Ravnest's fitness, to be least: max - min over clusters of the time in which its nodes fill their
    RAM, sum of ram_i / bw_i. A node has one bandwidth there: here its uplink.
    """
    sums = []
    for cluster in clusters:
        total = 0.0
        for device in cluster:
            total += devices.memory[device] / devices.uplink[device]
        sums.append(total)
    return max(sums) - min(sums)


def test_ravnest_clusters_of_equal_devices_are_balanced():
    """Where the devices are equal, so are our pipelines, and none is better balanced.

    Differs on purpose: the balance says nothing about how fast a step is (one cluster of all is always
    balanced, and not what we find), so it is no goal here. Uneven pipelines get uneven shares of the
    microbatches instead, and are done at the same time.
    """
    devices = Devices(
        flops=np.full(6, 1e13),
        memory=np.full(6, 1e12),
        uplink=np.full(6, 1e9),
        latency=np.zeros((6, 6)),
        bandwidth=np.full((6, 6), 1e9),
    )
    work = replace(
        some_work(2, 0), flops=np.full(2, 1e13), crossing=np.array([0.0, 1e6, 0.0]), microbatches=12
    )
    found = PlanSearch(devices, work, 0).run(turns(300))
    assert found is not None
    clusters = [one.devices for one in found.best.pipelines]
    assert len(clusters) > 1
    assert imbalance(devices, clusters) == imbalance(devices, [range(6)]) == 0.0
