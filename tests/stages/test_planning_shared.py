"""Devices that share a processor or a line: no plan is taken to use more of it than there is."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hetpeer.stages.planning.swarms.current_step_time import as_it_is
from hetpeer.stages.planning.swarms.incremental_plan import IncrementalPlanner
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts
from hetpeer.stages.planning.swarms.plan_inputs import Devices, Sharing, StepDemand
from hetpeer.stages.planning.swarms.stakes import Stakes
from hetpeer.stages.planning.swarms.swarm_plan import planned
from tests.amounts import mostly_proof
from tests.stages.test_planning_living import roomy, turns
from tests.stages.test_planning_swarms import some_devices, some_work


def sharing(processor: list[int], line: list[int] | None = None, part: float = 1.0) -> Sharing:
    lines = list(range(len(processor))) if line is None else line
    return Sharing(processor=np.array(processor), part=np.full(len(processor), part), line=np.array(lines))


def on_one_machine() -> tuple[Devices, StepDemand, list[tuple[int, int]]]:
    """Four with a core each of a machine of two, and uneven parts of a model: 2, 2, 2 and 6 blocks."""
    fast = np.full((4, 4), 1e10)
    devices = Devices(
        flops=np.full(4, 1e10),
        memory=np.full(4, 1e12),
        uplink=np.full(4, 1e10),
        latency=np.full((4, 4), 1e-4) * (1.0 - np.eye(4)),
        bandwidth=fast * (1.0 - np.eye(4)),
    )
    work = StepDemand(
        flops=np.full(12, 1e9),
        constants=np.full(12, 1e6),
        kept=np.full(12, 1e6),
        crossing=np.array([0.0, *[1e5] * 11, 0.0]),
        reduced=np.full(12, 1e6),
        state=np.full(12, 3e6),
        microbatches=16,
    )
    return devices, work, [(0, 2), (2, 4), (4, 6), (6, 12)]


def test_a_balance_on_one_processor_is_not_promised_what_the_processor_does_not_have() -> None:
    """By themselves the four would take half as long in equal parts. Two cores compute all of it either way:
    16 microbatches of 12 blocks, 0.3 s a block, 28.8 s.
    """
    devices, work, held = on_one_machine()
    lines = [list(enumerate(held))]
    own = IncrementalPlanner(devices, work, held, lines, Stakes(steps=1000), seed=0)
    change = own.run(turns(400))
    assert change is not None
    assert change.plan.total_s < 0.65 * own.before_s
    together = replace(devices, sharing=sharing([0] * 4, part=0.5))
    shared = IncrementalPlanner(together, work, held, lines, Stakes(steps=1000), seed=0)
    assert shared.before_s == pytest.approx(own.before_s, rel=0.05)
    equal = shared.change([((0, 1, 2, 3), (0, 3, 6, 9, 12))])
    assert equal is not None
    assert equal.plan.total_s == pytest.approx(28.8, rel=0.01)
    slower = replace(together, sharing=sharing([0] * 4))
    assert IncrementalPlanner(slower, work, held, lines, Stakes(steps=1000), seed=0).run(turns(400)) is None


def test_a_line_carries_what_all_behind_it_send() -> None:
    """Two pipelines, whose first devices live in one home, and their second ones in another."""
    devices, work, _ = on_one_machine()
    devices = replace(devices, uplink=np.full(4, 1e4), bandwidth=np.minimum(devices.bandwidth, 1e4))
    cuts = PipelineCuts(devices, work)
    pipelines = [cuts.at((0, 1), (0, 6, 12)), cuts.at((2, 3), (0, 6, 12))]
    apart = planned(devices, work, pipelines)
    homes = replace(devices, sharing=sharing([0, 1, 2, 3], [0, 1, 0, 1]))
    together = planned(homes, work, pipelines)
    sent_s = 16 * 1e5 / 1e4
    assert together.pipeline_s == pytest.approx(max(apart.pipeline_s, sent_s))
    assert together.pipeline_s > 1.5 * apart.pipeline_s
    assert together.sync_s == pytest.approx(apart.sync_s), "who shares a line reduces at home"
    across = planned(replace(devices, sharing=sharing([0, 1, 2, 3], [0, 1, 1, 0])), work, pipelines)
    assert across.sync_s == pytest.approx(2 * 6e6 / 1e4, rel=0.01), (
        "and otherwise two halves leave through it"
    )
    held = [(0, 6), (6, 12), (0, 6), (6, 12)]
    assert as_it_is(homes, work, held) > 1.5 * as_it_is(devices, work, held) - apart.sync_s


@pytest.mark.parametrize("seed", mostly_proof(range(12), range(3)))
def test_sharing_makes_no_step_shorter_and_none_of_it_changes_nothing(seed: int) -> None:
    random = np.random.default_rng(seed)
    devices, work = roomy(some_devices(6, seed)), some_work(9, seed)
    orders = random.permutation(6).reshape(2, 3).tolist()
    cuts = PipelineCuts(devices, work)
    pipelines = [cuts.at(tuple(order), (0, 3, 6, 9)) for order in orders]
    places = {d: p for o in orders for d, p in zip(o, itertools.pairwise((0, 3, 6, 9)), strict=True)}
    held = [places[device] for device in range(6)]
    alone = replace(devices, sharing=sharing(list(range(6))))
    shared = sharing(random.integers(3, size=6).tolist(), random.integers(3, size=6).tolist())
    some = replace(devices, sharing=shared)
    assert planned(alone, work, pipelines).total_s == pytest.approx(planned(devices, work, pipelines).total_s)
    assert as_it_is(alone, work, held) == pytest.approx(as_it_is(devices, work, held))
    assert planned(some, work, pipelines).total_s >= planned(devices, work, pipelines).total_s * (1 - 1e-9)
    assert as_it_is(some, work, held) >= as_it_is(devices, work, held) * (1 - 1e-9)
    which = [4, 1, 3]
    assert some.some(which).sharing.line.tolist() == shared.line[which].tolist()
