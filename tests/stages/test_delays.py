"""Which versions a step that overlaps is computed with."""

import pytest

from hetpeer.stages.pipeline.delays import Delays
from hetpeer.stages.pipeline.effects import RunForward
from hetpeer.stages.pipeline.pipeline import Pipeline
from hetpeer.stages.pipeline.routes import Hop

STAGES = ((0, 2), (2, 1), (3, 0))


@pytest.mark.parametrize(
    ("delays", "opened", "expected"),
    [
        (Delays(), 2, [[2, 2, 2, 2]] * 2),
        (Delays(stages=STAGES), 2, [[2, 2, 1, 0]] * 2),
        (Delays(stages=STAGES), 1, [[1, 1, 1, 0]] * 2),
        (Delays(stages=STAGES), 0, [[0, 0, 0, 0]] * 2),
        (Delays(head_start=1), 2, [[2, 2, 2, 2], [0, 0, 0, 0]]),
        (Delays(head_start=1, stages=STAGES), 2, [[2, 2, 1, 0], [0, 0, 0, 0]]),
    ],
)
def test_a_block_is_as_far_behind_as_its_stage_and_the_step_allow(delays, opened, expected):
    found = [[delays.behind(opened, number, block) for block in range(4)] for number in range(2)]
    assert found == expected


def test_a_step_waits_if_it_was_opened_further_behind_than_its_last_stage_may_be():
    assert [Delays(stages=STAGES[:2]).waits(opened) for opened in range(3)] == [False, False, True]
    assert not Delays(head_start=1).waits(8)


def test_a_place_waits_for_the_newest_version_that_any_of_its_blocks_needs():
    roster = {"a": (0, 3), "b": (3, 4)}
    route = (Hop("a", 0, 3), Hop("b", 3, 4))
    core = Pipeline("a", roster, 4, 4, behind=2, delays=Delays(stages=STAGES))
    assert core.assign(0, route, 0) == []
    assert not core.held_up
    (run,) = core.advance(1)
    assert isinstance(run, RunForward)
    assert run.key.id == 0
