"""Microbatches that nobody can compute, in the simulator with the real cores: no volunteer is blamed for
them, and nobody can have others left out (docs/trust.md, "A sample that cannot be computed").

Each history checks that every update has exactly the ids that can be computed, and that the run ends in the
state of one machine that leaves out the same.
"""

import pytest

from hetpeer.peer.simulate.sim_hooks import ViolationError
from tests.amounts import mostly_proof
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import LAYOUTS
from tests.simulation.lying_swarms import BLOCKS, history, said
from tests.simulation.sim_grouped import GroupedSwarm

LOSS, EMBEDDING, GRADIENT = BLOCKS - 1, 0, -1 - 1
"""Where a bad microbatch fails: at the loss, where the data is read, in the backward of block 1."""
HELD_OUT = 6
"""The first held-out id."""


def config(bad, volunteers=3, layout=1, **more):
    return HistoryConfig(volunteers=volunteers, layouts=LAYOUTS[layout], bad=bad, **more)


def skipped(swarm):
    return {
        (record["kind"], record["step"]): record["skipped"] for record in swarm.log if "skipped" in record
    }


@pytest.mark.parametrize("volunteers", mostly_proof([1, 2, 3, 6], [2, 3]))
@pytest.mark.parametrize("where", [LOSS, EMBEDDING, GRADIENT])
def test_a_bad_sample_is_left_out_and_nobody_is_blamed(where, volunteers):
    swarm = history(config({(2, 3): where}, volunteers, volunteers > 1, skips=True), seed=0)
    assert not said(swarm, "rollback")
    assert not said(swarm, "gone")
    assert [(one["batch"], one["id"]) for one in said(swarm, "bad_sample")] == [(2, 3)]
    assert [one["skipped"] for one in said(swarm, "commit") if one["step"] == 2] == [[3]]
    assert sum("skipped" in one for one in said(swarm, "commit")) == 1


@pytest.mark.parametrize("seed", mostly_proof(range(20), [0, 1]))
def test_bad_samples_are_left_out_whatever_dies_meanwhile(seed):
    bad = {(1, 0): LOSS, (1, 4): EMBEDDING, (3, 5): GRADIENT, (6, 2): LOSS, (None, HELD_OUT): LOSS}
    swarm = history(
        config(bad, volunteers=5, skips=True, staleness=seed % 2), seed, faults=12, limit_s=1800.0
    )
    assert {(one["batch"], one["id"]) for one in said(swarm, "bad_sample")} == bad.keys()


def test_a_bad_held_out_sample_is_found_once_and_left_out_of_each_evaluation():
    swarm = history(config({(None, HELD_OUT): LOSS}, skips=True), seed=0)
    assert len(said(swarm, "bad_sample")) == 1
    assert {tuple(one["skipped"]) for one in said(swarm, "evaluation")} == {(HELD_OUT,)}


def halted(settings, seed=0):
    """A history that ends with a halt: its swarm."""
    swarm = CheckedSwarm(seed, settings, CheckedSymbols(BLOCKS), Coverage())
    with pytest.raises(ViolationError, match="the run was halted"):
        swarm.run(900.0)
    return swarm


@pytest.mark.parametrize("volunteers", [2, 3])
@pytest.mark.parametrize("where", [LOSS, EMBEDDING, GRADIENT])
def test_a_bad_sample_halts_the_run_at_once_and_is_named(where, volunteers):
    swarm = halted(config({(1, 3): where}, volunteers))
    assert "sample 3 of shard 1" in swarm.log[-1]["why"]
    assert not said(swarm, "gone")
    assert swarm.world.now < 60.0


def test_a_step_without_anything_to_compute_halts_the_run():
    swarm = halted(config({(1, i): LOSS for i in range(6)}, skips=True))
    assert swarm.log[-1]["why"] == "no microbatch of step 1 can be computed"


def test_an_evaluation_without_anything_to_compute_halts_the_run():
    swarm = halted(config({(None, HELD_OUT + i): LOSS for i in range(2)}, skips=True))
    assert swarm.log[-1]["why"] == "no held-out microbatch of step 0 can be computed"


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("seed", mostly_proof(range(3), [0]))
def test_volunteers_that_fail_everything_have_no_sample_left_out(seed, skips):
    lies = {"v2": "fails", "v3": "fails"}
    swarm = history(HistoryConfig(volunteers=4, layouts=LAYOUTS[0], lies=lies, skips=skips), seed)
    assert not said(swarm, "bad_sample")


def test_all_holders_of_a_block_have_no_sample_left_out():
    """They halt the run in the end, as they could by doing nothing."""
    lies = {f"v{number}": "fails" for number in range(2)}
    swarm = halted(HistoryConfig(volunteers=2, layouts=LAYOUTS[0], lies=lies, skips=True))
    assert not said(swarm, "bad_sample")


def test_a_bad_sample_is_left_out_in_a_grouped_run():
    settings = config({(2, 3): LOSS, (None, HELD_OUT): LOSS}, volunteers=4, skips=True)
    swarm = GroupedSwarm(0, settings, CheckedSymbols(BLOCKS), Coverage())
    swarm.run(1800.0)
    assert {(one["batch"], one["id"]) for one in said(swarm, "bad_sample")} == {(2, 3), (None, HELD_OUT)}
    assert [one["skipped"] for one in said(swarm, "commit") if one["batch"] == 2] == [[3]]


@pytest.mark.parametrize("seed", mostly_proof(range(10), [0]))
@pytest.mark.parametrize("where", [LOSS, GRADIENT])
def test_spot_checks_of_a_step_with_a_bad_sample_convict_nobody(where, seed):
    settings = config({(2, 3): where, (4, 0): where}, volunteers=6, skips=True, check_share=1.0)
    swarm = history(settings, seed)
    assert {(one["batch"], one["id"]) for one in said(swarm, "bad_sample")} == {(2, 3), (4, 0)}
    assert not said(swarm, "banned")
    assert not said(swarm, "dispute")
    assert not said(swarm, "gone")
