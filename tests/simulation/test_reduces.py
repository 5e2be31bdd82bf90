"""Volunteers that spoil reduces, or hold them up, in the simulator: whoever they are, the run goes on to its
end (docs/trust.md, "Disputes in a reduce").

That it ends in the state of one machine is looked at in each history.
"""

from itertools import pairwise
from statistics import fmean

import pytest

from hetpeer.bootstrap.conduct.disputed_pairs import SHUNNED_REST
from tests.amounts import mostly_proof
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.histories import LAYOUTS, TIES
from tests.simulation.lying_swarms import BLOCKS, PAIRS, STEPS, lying, said
from tests.simulation.sim_grouped import GroupedSwarm

KINDS = ["votes", "denies", "tears", "spoils", "objects", "withholds"]
LIES = pytest.mark.parametrize("lie", KINDS)
SEVERAL = {
    "one stage": HistoryConfig(volunteers=4, layouts=LAYOUTS[0]),
    "two stages": HistoryConfig(volunteers=8, layouts=LAYOUTS[1]),
    "uneven, tied": HistoryConfig(volunteers=6, layouts=LAYOUTS[3], ties=TIES),
}
HELD_UP = 3
"""Steps that one liar holds up at most, before it is banned."""


def held_up(swarm):
    """Steps that needed more than one plan."""
    return [record["step"] for record in said(swarm, "commit") if record["plan"] > 1]


@pytest.mark.parametrize(
    ("shape", "lie"),
    mostly_proof(
        [
            *((shape, lie) for shape in SEVERAL for lie in KINDS),
            ("one stage", "objects+denies"),
            ("one stage", "tears+withholds"),
        ],
        [("one stage", lie) for lie in (*KINDS, "objects+denies", "tears+withholds")],
    ),
)
def test_one_of_several_holds_up_a_few_steps_and_nobody_else_is_blamed(lie, shape):
    swarm, liar = lying(SEVERAL[shape], lie)
    assert {record["peer"] for record in said(swarm, "gone")} <= {liar}
    assert {record["peer"] for record in said(swarm, "banned")} <= {liar}
    assert len(held_up(swarm)) <= HELD_UP
    assert not said(swarm, "rollback")


@pytest.mark.parametrize("lie", ["votes", "denies"])
def test_who_contradicts_most_others_again_and_again_does_not_come_back(lie):
    swarm, liar = lying(SEVERAL["one stage"], lie, steps=60)
    (banned,) = said(swarm, "banned")
    first, second, third = held_up(swarm)
    assert second - first >= SHUNNED_REST
    assert third - second >= 2 * SHUNNED_REST
    assert banned["peer"] == liar
    assert not swarm.volunteers[liar].alive


@pytest.mark.parametrize("shape", ["one stage", "two stages"])
@pytest.mark.parametrize("lie", ["keeps", "abstains"])
def test_who_is_waited_for_in_vain_holds_up_ever_fewer_steps(lie, shape):
    swarm, liar = lying(SEVERAL[shape], lie, steps=40)
    assert {record["peer"] for record in said(swarm, "gone")} <= {liar}
    assert not said(swarm, "banned"), "it may be its line"
    slow = held_up(swarm)
    apart = [later - earlier for earlier, later in pairwise(slow)]
    assert 2 <= len(slow) <= 6
    assert apart == sorted(apart)


@pytest.mark.parametrize("shape", mostly_proof(PAIRS, [*PAIRS][:1]))
@LIES
def test_where_it_is_word_against_word_the_run_goes_on_with_one_of_the_two(lie, shape):
    swarm, _ = lying(PAIRS[shape], lie)
    assert not said(swarm, "banned"), "nobody knows which of the two"
    steps = {record["step"]: record["seconds"] for record in said(swarm, "commit")}
    assert steps.keys() == set(range(STEPS))
    assert fmean(steps.values()) < 5 * swarm.config.reduce_s


@pytest.mark.parametrize("lie", ["votes", "tears", "withholds"])
@pytest.mark.parametrize("seed", mostly_proof(range(2), [1]))
def test_with_steps_that_overlap_and_faults_besides(lie, seed):
    swarm, liar = lying(SEVERAL["two stages"], lie, seed, faults=4, staleness=seed)
    assert {record["peer"] for record in said(swarm, "banned")} <= {liar}


@pytest.mark.parametrize("layout", mostly_proof([0, 1], [0]))
@LIES
def test_an_averaging_is_not_spoilt_for_ever_either(lie, layout):
    volunteers = 3 * (layout + 1)
    liar = f"v{volunteers - 1}"
    config = HistoryConfig(volunteers=volunteers, layouts=LAYOUTS[layout], steps=12, lies={liar: lie})
    swarm = GroupedSwarm(0, config, CheckedSymbols(BLOCKS), Coverage(), delayed=bool(layout))
    swarm.run(900.0)
    assert {record["peer"] for record in said(swarm, "banned")} <= {liar}
    assert len(said(swarm, "average")) > 1
