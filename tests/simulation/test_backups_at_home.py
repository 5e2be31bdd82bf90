"""Eight volunteers at home whose steps wait for sums: planned, arranged and simulated with their lines."""

from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.peer.simulate.network.sim_uplinks import SimHardware
from hetpeer.peer.simulate.scenario_run import SHARD, _piece_s
from hetpeer.peer.simulate.sim_config import SwarmConfig
from hetpeer.peer.simulate.sim_numerics import Symbols
from hetpeer.peer.simulate.sim_swarm import SimSwarm
from hetpeer.stages.planning.swarms.incremental_plan import IncrementalPlanner
from hetpeer.stages.planning.swarms.stakes import Stakes
from tests.simulation.lying_swarms import said
from tests.stages.test_planning_living import turns
from tests.stages.test_planning_stakes import in_homes, two_pipelines

QUARTERS = ((0, 1), (1, 2), (2, 3), (3, 4))
ARRANGED = 4
"""Commits after which the plan is proposed."""


def test_a_step_takes_as_long_as_that_of_one_pipeline_once_the_others_are_backups() -> None:
    """The model's figures are those of the simulated steps, before and after."""
    devices, work = in_homes(4)
    devices = replace(devices, memory=np.full(8, 2e9))
    held, lines = two_pipelines(4)
    planner = IncrementalPlanner(devices, work, held, lines, Stakes(steps=200), seed=0)
    change = planner.run(turns(1500))
    assert change is not None
    working = {device for one in change.plan.pipelines for device in one.devices}
    swarm = SimSwarm(
        1,
        replace(
            SwarmConfig(),
            volunteers=8,
            layouts=(QUARTERS,),
            seats=tuple((cluster, begin) for cluster in (0, 1) for begin in range(4)),
            steps=10,
            microbatches=work.microbatches,
            evaluation_microbatches=0,
            slot_capacity=work.microbatches,
            latency_s=(0.02, 0.02),
            stall_s=15.0,
            reduce_s=20.0 + _piece_s(devices, work),
            sync_s=3000.0,
            speeds=tuple(devices.flops.tolist()),
            uplinks=tuple(devices.uplink.tolist()),
            duplicates=0.0,
            shard_length=SHARD,
            hardware=SimHardware(devices=devices, work=work, target_s=5.0),
        ),
        Symbols(4),
    )
    arrangement = Arrangement(
        (QUARTERS, QUARTERS),
        {f"v{device}": (device // 4, place) for device, place in enumerate(held)},
        backups=frozenset(f"v{device}" for device in range(8) if device not in working),
    )

    def propose(what: str) -> None:
        if what == "record commit" and len(said(swarm, "commit")) == ARRANGED:
            swarm.host.later(
                lambda: swarm.host.event("arrange", lambda core, now: core.arrange(arrangement, now))
            )

    swarm.hooks.append(propose)
    swarm.run(1e5)
    kinds = [record["kind"] for record in swarm.log if record["kind"] in ("commit", "arranged")]
    seconds, moved = [record["seconds"] for record in said(swarm, "commit")], kinds.index("arranged")
    assert median(seconds[1:moved]) == pytest.approx(planner.before_s, rel=0.05)
    assert median(seconds[moved:]) == pytest.approx(change.plan.total_s, rel=0.05)
    assert median(seconds[moved:]) < 0.4 * median(seconds[1:moved])
