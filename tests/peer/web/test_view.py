"""The newest loss of a run beside what its log said some seconds ago."""

import pytest

from hetpeer.peer.watching.swarm import Progress
from hetpeer.peer.web.view import up_to_now

CURVE = [(1.0, 5.0), (2.0, 4.0)]


@pytest.mark.parametrize(
    ("step", "loss", "shown"),
    [
        (3, 3.5, [*CURVE, (3, 3.5)]),
        (2, 3.5, CURVE),  # the log knows better
        (1, 3.5, CURVE),
        (3, None, CURVE),
    ],
)
def test_the_newest_point(step: int, loss: float | None, shown: list[tuple[float, float]]) -> None:
    assert up_to_now(CURVE, Progress(step=step, steps=9, loss=loss, eta_s=None)) == shown


def test_a_run_whose_log_nobody_tells() -> None:
    assert up_to_now([], Progress(step=4, steps=9, loss=1.0, eta_s=None)) == [(4, 1.0)]
    assert up_to_now([], Progress(step=0, steps=9, loss=None, eta_s=None)) == []
