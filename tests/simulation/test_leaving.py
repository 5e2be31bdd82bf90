"""The last holder of a block leaves in good order, in the simulator: no committed step is lost."""

from dataclasses import replace

import pytest

from hetpeer.averaging import messages as m
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.lying_swarms import said
from tests.simulation.test_frozen_holders import CONFIG, OVERLAPPING, lost_steps, played

WITHIN_S = 30.0


def leave(swarm: CheckedSwarm, volunteer) -> None:
    """Say farewell, go once the coordinator says so or the time is over, and come back later."""
    swarm.tell(volunteer, m.Farewell(within_s=WITHIN_S))
    left = len(said(swarm, "gone"))
    process = volunteer.process

    def go(rest_s: float) -> None:
        if volunteer.process != process:
            return
        if len(said(swarm, "gone")) > left or rest_s <= 0.0:
            volunteer.kill()
            swarm.world.after(3.0, volunteer.start)
        else:
            swarm.world.after(0.05, lambda: go(rest_s - 0.05))

    go(WITHIN_S)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("config", [CONFIG, OVERLAPPING], ids=["one step", "two steps"])
@pytest.mark.parametrize("moment", ["record commit", "tell vote", "tell sealed", "tell applied"])
def test_no_committed_step_is_lost(moment: str, config, seed: int) -> None:
    swarm = played(config, moment, 8, leave, seed)
    assert [record["why"] for record in said(swarm, "gone")][:1] == ["said farewell"]
    assert lost_steps(swarm) == 0


@pytest.mark.parametrize("seed", range(4))
def test_both_leave_at_once(seed: int) -> None:
    def both(swarm: CheckedSwarm, _volunteer) -> None:
        for volunteer in swarm.volunteers.values():
            leave(swarm, volunteer)

    assert lost_steps(played(CONFIG, "record commit", 8, both, seed)) == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_other_one_dies_meanwhile_and_the_run_goes_on(seed: int) -> None:
    def act(swarm: CheckedSwarm, volunteer) -> None:
        leave(swarm, volunteer)
        swarm.volunteers["v0"].kill()
        swarm.world.after(2.0, swarm.volunteers["v0"].start)

    played(replace(CONFIG, checkpoint_every=4), "record commit", 7, act, seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_store_that_fails_once_is_tried_again(seed: int) -> None:
    def act(swarm: CheckedSwarm, volunteer) -> None:
        swarm.store.fail()
        leave(swarm, volunteer)

    assert lost_steps(played(CONFIG, "record commit", 8, act, seed)) == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_coordinator_dies_meanwhile(seed: int) -> None:
    def act(swarm: CheckedSwarm, volunteer) -> None:
        leave(swarm, volunteer)
        swarm.world.after(0.05, lambda: swarm.crash_coordinator(1.0))

    played(CONFIG, "record commit", 8, act, seed)
