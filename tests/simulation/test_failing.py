"""Volunteers that say that they, or others, cannot compute what they can, in the simulator with the real
cores: the run goes on to its end (docs/trust.md, "What cannot be computed").

That it ends in the state of one machine is looked at in each history.
"""

import pytest

from hetpeer.bootstrap.conduct.outliers import ENOUGH
from hetpeer.peer.simulate.sim_hooks import ViolationError
from tests.amounts import mostly_proof
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import LAYOUTS
from tests.simulation.lying_swarms import BLOCKS, STEPS, history, said
from tests.simulation.sim_grouped import GroupedSwarm

TWO_STAGES = ((0, 0), (0, 2), (1, 0))
"""Seats of three volunteers: the second one holds its blocks alone."""


@pytest.mark.parametrize("seed", mostly_proof(range(3), [0]))
def test_two_that_fail_and_blame_everybody_halt_nothing(seed):
    lies = {"v2": "fails", "v3": "blames"}
    swarm = history(HistoryConfig(volunteers=4, layouts=LAYOUTS[0], lies=lies), seed)
    assert not said(swarm, "rollback")
    assert {record["peer"] for record in said(swarm, "gone")} <= lies.keys()


@pytest.mark.parametrize("seed", mostly_proof(range(3), [0]))
def test_a_sole_holder_that_fails_is_replaced_by_who_can_be_spared(seed):
    config = HistoryConfig(
        volunteers=3, layouts=LAYOUTS[1], steps=STEPS, lies={"v1": "fails"}, seats=TWO_STAGES
    )
    swarm = history(config, seed)
    assert "v1" in {record["peer"] for record in said(swarm, "gone")}


@pytest.mark.parametrize("volunteers", [1, 2, 4])
def test_what_everybody_fails_ends_the_run(volunteers):
    """The same happens if a loss is no number."""
    lies = {f"v{number}": "fails" for number in range(volunteers)}
    with pytest.raises(ViolationError, match="the run was halted"):
        history(HistoryConfig(volunteers=volunteers, layouts=LAYOUTS[volunteers > 1], lies=lies), seed=0)


def grouped(volunteers, lies):
    config = HistoryConfig(volunteers=volunteers, layouts=LAYOUTS[1], steps=STEPS, lies=lies)
    swarm = GroupedSwarm(0, config, CheckedSymbols(BLOCKS), Coverage())
    swarm.run(1800.0)
    return swarm


def test_one_that_fails_in_one_of_several_pipelines_halts_nothing():
    """Others are given what it fails; its own pipeline falls apart each time."""
    swarm = grouped(6, {"v5": "fails"})
    assert said(swarm, "dissolved")
    assert "v5" in {record["peer"] for record in said(swarm, "gone")}


def test_what_every_pipeline_fails_ends_the_run():
    with pytest.raises(ViolationError, match="the run was halted"):
        grouped(6, {f"v{number}": "fails" for number in range(6)})


def inflating(volunteers, seed, limit_s=900.0):
    """A run in which `v1` holds its blocks alone and says that their norm is huge."""
    config = HistoryConfig(
        volunteers=volunteers,
        layouts=LAYOUTS[1],
        steps=ENOUGH + STEPS,
        clip_norm=1.0,
        lies={"v1": "inflates"},
        seats=TWO_STAGES,
    )
    return history(config, seed, limit_s=limit_s)


@pytest.mark.parametrize("seed", mostly_proof(range(3), [0]))
def test_a_sole_holder_that_makes_nothing_of_everybodys_update_is_replaced(seed):
    swarm = inflating(3, seed)
    """By then another holder of the blocks says something else."""
    gone = {record["peer"] for record in said(swarm, "gone") if "the norm of block" in record["why"]}
    assert gone == {"v1"}
    assert not any("outliers" in record for record in said(swarm, "commit"))


def test_where_nobody_can_be_spared_its_word_is_taken_and_the_log_names_it():
    # Each of its 11 to 17 roll-backs costs a minute: of 60 seeds the quickest takes 882 s, the slowest 1,179.
    swarm = inflating(2, seed=0, limit_s=1200.0)
    named = {block for record in said(swarm, "commit") for block in record.get("outliers", ())}
    assert named <= {2, 3}
    assert named
