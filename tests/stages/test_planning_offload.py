"""Plans for devices with main memory and a disk beside the memory that they compute in."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.peer.planning.model_workload import PRESETS, USUAL, PresetChoices, preset
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.pipeline.place_memory import CHOICES, kinds_of
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts, lacking
from hetpeer.stages.planning.swarms.plan_inputs import Beside, Devices, StepDemand
from hetpeer.stages.planning.swarms.plan_search import PlanSearch
from hetpeer.stages.planning.swarms.swarm_plan import planned

GIB = float(1 << 30)
BF16 = PresetChoices(bf16=True, recompute=True)


def devices_of(memory: list[float], beside: Beside | list[Beside], flops: float = 30e12) -> Devices:
    count = len(memory)
    return Devices(
        flops=np.full(count, flops),
        memory=np.array(memory),
        uplink=np.full(count, 1e9),
        latency=np.full((count, count), 0.01),
        bandwidth=np.full((count, count), 1e9),
        beside=tuple(beside) if isinstance(beside, list) else (beside,) * count,
    )


def some_work(blocks: int, seed: int) -> StepDemand:
    random = np.random.default_rng(seed)
    numbers = random.integers(10_000_000, 200_000_000, blocks).astype(np.float64)
    crossing = random.uniform(1e5, 1e7, blocks + 1)
    crossing[[0, -1]] = 0.0
    return StepDemand(
        flops=random.uniform(1e10, 1e12, blocks),
        constants=random.uniform(0, 1e8, blocks),
        numbers=numbers,
        halved=np.floor(numbers * random.uniform(0, 1, blocks)),
        kept=random.uniform(1e6, 1e8, blocks),
        crossing=crossing,
        reduced=4 * numbers,
        state=12 * numbers,
        microbatches=8,
    )


@given(st.integers(0, 10_000), st.integers(1, 6), st.data())
def test_a_plan_takes_no_more_of_any_memory_than_is_offered(seed, count, data) -> None:
    random = np.random.default_rng(seed)
    besides = [
        Beside(
            host=float(random.choice([0.0, random.uniform(1, 16)])) * GIB,
            disk=float(random.choice([0.0, random.uniform(1, 40)])) * GIB,
            kinds=kinds_of(data.draw(st.sampled_from(sorted(CHOICES)))),
        )
        for _ in range(count)
    ]
    devices = devices_of([float(random.uniform(1, 12)) * GIB for _ in range(count)], besides)
    work = some_work(6, seed)
    found = PlanSearch(devices, work, seed).run(lambda: False)
    if found is None:
        _, missing = lacking(devices, work)
        assert missing.total > 0
        return
    pipelines = PipelineCuts(devices, work)
    for one in found.best.pipelines:
        for stage in pipelines.stages(one.devices, one.cuts):
            beside = besides[stage.device]
            assert stage.memory <= devices.memory[stage.device]
            assert stage.host <= beside.host
            assert stage.disk <= beside.disk
            assert stage.offload in beside.kinds or Offload.HOST in beside.kinds


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_what_is_said_to_be_missing_is_enough_if_it_is_there(seed, count) -> None:
    random = np.random.default_rng(seed)
    memory = [float(random.uniform(0.5, 2)) * GIB for _ in range(count)]
    devices = devices_of(memory, Beside(host=GIB, disk=GIB))
    work = some_work(6, seed)
    device, missing = lacking(devices, work)
    memory[device] += missing.device
    beside = [devices.besides(number) for number in range(count)]
    beside[device] = replace(beside[device], host=GIB + missing.host, disk=GIB + missing.disk)
    assert PlanSearch(devices_of(memory, beside), work, seed).run(lambda: False) is not None


def test_seven_billion_parameters_fit_eight_gpus_of_8_gib_beside_16_gib_and_a_disk() -> None:
    """And not without offload, nor without a disk: an update needs 20 bytes a parameter, 125 GiB in all."""
    work = preset(PRESETS["gpt3-6.7b"], 64, BF16)
    beside = Beside(host=16 * GIB, disk=40 * GIB)
    devices = devices_of([8 * GIB] * 8, beside)
    found = PlanSearch(devices, work, 0).run(lambda: False)
    assert found is not None
    (one,) = found.best.pipelines
    stages = PipelineCuts(devices, work).stages(one.devices, one.cuts)
    assert sum(stage.end - stage.begin for stage in stages) == 32
    kinds = [stage.offload for stage in stages]
    assert Offload.NONE not in kinds
    assert kinds.count(Offload.DISK) <= 2, "main memory has room at most of them"
    on_gpus, no_disk = replace(beside, kinds=(Offload.NONE,)), Beside(host=16 * GIB)
    for without in (on_gpus, no_disk):
        small = devices_of([8 * GIB] * 8, without)
        assert PlanSearch(small, work, 0).run(lambda: False) is None
        _, missing = lacking(small, work)
        assert (missing.device if without is on_gpus else missing.host) > 0


def test_bfloat16_and_recomputation_save_memory_of_the_device() -> None:
    first = [
        PipelineCuts(
            devices_of([64 * GIB] * 4, Beside(host=64 * GIB, kinds=(Offload.HOST,))),
            preset(PRESETS["gpt3-1.3b"], 8, choices),
        ).stages((0, 1, 2, 3), (0, 6, 12, 18, 24))[0]
        for choices in (USUAL, PresetChoices(recompute=True), BF16)
    ]
    assert first[0].memory > 2 * first[1].memory
    assert 0.5 * first[1].memory < first[2].memory < 0.8 * first[1].memory
    assert first[0].host == first[2].host == 28 * sum(preset(PRESETS["gpt3-1.3b"], 8).elements[:6])


@pytest.mark.parametrize("kind", [Offload.HOST, Offload.DISK])
def test_a_gradient_goes_down_after_each_microbatch_and_weights_come_up_once_a_step(kind) -> None:
    work = replace(some_work(3, 0), microbatches=5)
    much = Beside(host=64 * GIB, disk=64 * GIB, kinds=(kind,))
    free = devices_of([64 * GIB], replace(much, pcie=math.inf, disk_rate=math.inf))
    slow = devices_of([64 * GIB], replace(much, pcie=1e9, disk_rate=2e8))
    plans = []
    for devices in (free, slow):
        one = PipelineCuts(devices, work).best((0,))
        assert one is not None
        plans.append(planned(devices, work, [one]))
    copied_s = (4 * work.elements - 2 * work.halved).sum() / 1e9
    filed_s = 2 * 12 * work.elements.sum() / 2e8 if kind is Offload.DISK else 0.0
    assert plans[0].update_s == 0.0
    assert plans[1].update_s == pytest.approx(copied_s + filed_s)
    assert plans[1].pipeline_s - plans[0].pipeline_s == pytest.approx(5 * copied_s)
    assert plans[1].total_s == pytest.approx(plans[1].pipeline_s + plans[1].update_s)


def test_a_processor_has_no_way_to_go() -> None:
    work = some_work(3, 1)
    slow = devices_of([64 * GIB], Beside(disk=64 * GIB, pcie=1.0, disk_rate=1.0))
    one = PipelineCuts(slow, work).best((0,))
    assert one is not None
    assert one.update == 0.0
    assert one.period == pytest.approx(3 * work.flops.sum() / 30e12)
