"""A volunteer's phase, and who may change it; what the worker has, session after session."""

import ast
from pathlib import Path

import pytest

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.member.member_life import MemberLife, Phase
from tests.averaging.rig import DIGESTS, LINE, fetch, place, welcome

AVERAGING = Path(__file__).parents[2] / "hetpeer" / "averaging"
POSITION = {"line", "place", "version", "digests", "group"}


@pytest.fixture
def life():
    return MemberLife(m.Hello(run="run", incarnation=7))


@pytest.fixture
def ready(life):
    """Ready with version 3 of both blocks."""
    life.welcomed(welcome())
    life.enter(welcome())
    life.take(m.Granted(line=LINE, begin=0, end=2))
    life.prepared(1e9)
    life.fetch(fetch())
    life.loaded(LINE, 3, DIGESTS)
    assert life.phase is Phase.READY
    return life


def setters(path):
    """Attributes of a volunteer's phase and position that this module sets."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            positions = isinstance(node.value, ast.Attribute) and node.value.attr == "position"
            if node.attr == "phase" or (positions and node.attr in POSITION):
                found.add(node.attr)
    return found


def test_one_module_sets_the_phase_and_the_position():
    found = {path.name: setters(path) for path in AVERAGING.rglob("*.py")}
    assert {name: what for name, what in found.items() if what} == {"member_life.py": POSITION | {"phase"}}


def test_a_new_volunteer_is_asked_to_choose(life):
    life.welcomed(welcome())
    assert life.enter(welcome()) == e.Choose((place(),))
    assert (life.phase, life.line) == (Phase.JOINING, LINE)


def test_graphs_are_loaded_once_however_often_the_place_is_granted(life):
    life.welcomed(welcome())
    granted = m.Granted(line=LINE, begin=0, end=2)
    assert life.take(granted) == [e.Prepare(0, 2)]
    assert life.take(granted) == []
    assert life.phase is Phase.PREPARING
    assert life.prepared(2e9) == [e.Tell(m.Prepared(flops_per_second=2e9))]
    assert life.phase is Phase.SYNCING
    assert life.take(granted) == [e.Tell(m.Prepared(flops_per_second=2e9))], "the worker has them"


def test_graphs_of_a_place_that_was_left_are_no_reason_to_ask_for_its_state(life):
    life.welcomed(welcome())
    life.take(m.Granted(line=LINE, begin=0, end=2))
    assert life.take(m.Granted(line=LINE, begin=1, end=2)) == [e.Prepare(1, 2)]
    assert life.prepared(1e9) != [], "these are of the place that it has"
    assert life.prepared(1e9) == []


def test_a_state_that_nobody_waits_for_any_more_is_not_taken(ready):
    ready.fetch(fetch(version=4))
    assert ready.loaded(LINE, 3, DIGESTS) == []
    ready.go_back(m.RolledBack(line=LINE.model_copy(update={"view": 2}), version=0, why="lost"))
    assert ready.loaded(ready.line, 4, DIGESTS) == []
    assert ready.position.version is None


def test_a_session_of_a_later_history_trusts_no_state(ready):
    ready.welcomed(welcome(line=LINE.model_copy(update={"view": 5}), since=4))
    assert ready.position.version is None


@pytest.mark.parametrize(("phase", "kept"), [("ready", 3), ("apply", None)])
def test_the_state_to_go_back_to_is_kept_unless_an_update_is_under_way(ready, phase, kept):
    getattr(ready, phase)()
    later = m.RolledBack(line=LINE.model_copy(update={"view": 2}), version=3, why="lost")
    assert ready.goes_back(later)
    assert len(ready.go_back(later)) == 1
    assert ready.position.version == kept
    assert not ready.goes_back(later), "it is known"


def test_a_step_begins_with_a_place_and_no_later_version(life, ready):
    assert not MemberLife(life.hello).may_begin(3)
    assert ready.may_begin(3)
    assert not ready.may_begin(2)


def test_after_an_update_other_steps_go_on_or_it_is_ready(ready):
    told = ready.updated(3, {0: "new 0", 1: "new 1"}, trains=True)
    assert ready.phase is Phase.TRAINING
    assert told.message.step == 3
    assert {held.block: held.digest for held in told.message.held} == {0: "new 0", 1: "new 1"}
    ready.updated(4, DIGESTS, trains=False)
    assert (ready.phase, ready.position.version) == (Phase.READY, 5)


def test_only_a_backup_that_has_its_graphs_is_spared(life):
    life.welcomed(welcome(backup=True))
    assert not life.is_spared
    life.take(m.Granted(line=LINE, begin=0, end=2, backup=True))
    assert not life.is_spared
    life.prepared(1e9)
    assert life.is_spared
    life.fetch(fetch())
    assert not life.is_spared, "the coordinator has said so"
