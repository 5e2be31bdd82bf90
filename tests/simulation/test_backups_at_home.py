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
from tests.amounts import mostly_proof
from tests.simulation.lying_swarms import said
from tests.stages.test_planning_living import turns
from tests.stages.test_planning_stakes import in_homes, two_pipelines

QUARTERS = ((0, 1), (1, 2), (2, 3), (3, 4))
ARRANGED = 4
"""Commits after which the plan is proposed."""
DIES = 20
"""Commits after which a holder is killed."""


def at_home(**changes) -> SimSwarm:
    """Two pipelines of four, a quarter of the model each, and the lines of a home."""
    devices, work = in_homes(4)
    config = replace(
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
    )
    return SimSwarm(1, replace(config, **changes), Symbols(4))


def spare(swarm: SimSwarm, backups: frozenset[str]) -> None:
    """Make `backups` of `swarm` backups at their places after ARRANGED commits."""
    seats = {f"v{device}": (device // 4, QUARTERS[device % 4]) for device in range(8)}
    arrangement = Arrangement((QUARTERS, QUARTERS), seats, backups=backups)

    def propose(what: str) -> None:
        if what == "record commit" and len(said(swarm, "commit")) == ARRANGED:
            swarm.host.later(
                lambda: swarm.host.event("arrange", lambda core, now: core.arrange(arrangement, now))
            )

    swarm.hooks.append(propose)


def test_a_step_takes_as_long_as_that_of_one_pipeline_once_the_others_are_backups() -> None:
    """The model's figures are those of the simulated steps, before and after."""
    devices, work = in_homes(4)
    devices = replace(devices, memory=np.full(8, 2e9))
    held, lines = two_pipelines(4)
    planner = IncrementalPlanner(devices, work, held, lines, Stakes(steps=200), seed=0)
    change = planner.run(turns(1500))
    assert change is not None
    working = {device for one in change.plan.pipelines for device in one.devices}
    swarm = at_home()
    spare(swarm, frozenset(f"v{device}" for device in range(8) if device not in working))
    swarm.run(1e5)
    kinds = [record["kind"] for record in swarm.log if record["kind"] in ("commit", "arranged")]
    seconds, moved = [record["seconds"] for record in said(swarm, "commit")], kinds.index("arranged")
    assert median(seconds[1:moved]) == pytest.approx(planner.before_s, rel=0.05)
    assert median(seconds[moved:]) == pytest.approx(change.plan.total_s, rel=0.05)
    assert median(seconds[moved:]) < 0.4 * median(seconds[1:moved])


def killed(checkpoint_every: int, after_s: float) -> tuple[float, int, float]:
    """`after_s` into a step the only holder of a block is killed; states take nine minutes on its line.

    Returns the seconds from that to the next commit, the steps that are done again, and those of a step.
    """
    swarm = at_home(steps=DIES + 4, checkpoint_every=checkpoint_every)
    assert swarm.config.hardware is not None
    for number, volunteer in enumerate(swarm.volunteers.values()):
        volunteer.fetch_s = (swarm.config.hardware.state_s(number),) * 2
    spare(swarm, frozenset(f"v{device}" for device in range(4, 8)))
    at: list[float] = []

    def strike(what: str) -> None:
        done = len(said(swarm, "commit"))
        if what == "record commit" and done == DIES:
            swarm.world.after(after_s, lambda: (at.append(swarm.world.now), swarm.volunteers["v1"].kill()))
        elif what == "record commit" and done == DIES + 1:
            at.append(swarm.world.now)

    swarm.hooks.append(strike)
    swarm.run(1e5)
    died, went_on = at
    commits = said(swarm, "commit")
    assert [record["steps_in"] for record in said(swarm, "backups")] == [["v5"]]
    return went_on - died, len(commits) - swarm.config.steps, median(one["seconds"] for one in commits[-3:])


@pytest.mark.parametrize("after_s", mostly_proof((5.0, 20.0, 45.0, 74.0), (45.0,)))
def test_once_a_holder_is_killed_a_step_goes_on_ten_seconds_later_if_its_backup_has_the_checkpoint(after_s):
    """Nobody fetches anything. Steps since the checkpoint are done again, since nobody else had them."""
    waited_s, again, step_s = killed(1000, after_s)
    assert waited_s < step_s + 10.0
    assert again == DIES - ARRANGED - 1


def test_a_backup_that_is_fetching_the_checkpoint_goes_on_with_that():
    """All others have that checkpoint; it takes what is left of nine minutes, and no second fetch."""
    waited_s, again, _ = killed(3, 20.0)
    assert waited_s < 1065.0
    assert again == 2
