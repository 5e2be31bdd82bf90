"""The loss curve: a well-formed drawing, the same every time, whatever the numbers."""

import math
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from hetpeer.peer.watching.loss_plot import LEFT, RIGHT, TOP, WIDTH, PlotMark, _ticks, loss_curve

SVG = "{http://www.w3.org/2000/svg}"
CURVE = [(step, 2.5 + 3 * math.exp(-step / 12)) for step in range(60)]


def test_everything_is_drawn() -> None:
    svg = loss_curve(
        CURVE,
        evaluations=[(0, 5.5), (30, 2.9), (60, 2.6)],
        reference=CURVE,
        marks=[PlotMark(step=30, text="a <killed> & gone"), PlotMark(step=59, text="back", rollback=True)],
        title="demo",
    )
    root = ET.fromstring(svg)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"demo", "a <killed> & gone", "back", "step", "swarm", "one machine", "held-out", "60"} <= set(
        texts
    )
    assert len(list(root.iter(f"{SVG}polyline"))) == 2
    assert len(list(root.iter(f"{SVG}circle"))) == 3
    assert svg == loss_curve(
        CURVE,
        evaluations=[(0, 5.5), (30, 2.9), (60, 2.6)],
        reference=CURVE,
        marks=[PlotMark(step=30, text="a <killed> & gone"), PlotMark(step=59, text="back", rollback=True)],
        title="demo",
    )


def test_reference_lies_beneath_and_equal_curves_coincide() -> None:
    root = ET.fromstring(loss_curve(CURVE, reference=CURVE))
    beneath, above = root.iter(f"{SVG}polyline")
    assert beneath.get("points") == above.get("points")
    assert float(beneath.get("stroke-width", 0)) > float(above.get("stroke-width", 0))


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), max_size=8),
    st.lists(st.integers(0, 10**6), max_size=3),
)
def test_any_numbers_stay_on_the_paper(losses: list[float], kills: list[int]) -> None:
    curve = list(enumerate(losses))
    inside = [PlotMark(step=min(kill, len(losses)), text="killed") for kill in kills]
    root = ET.fromstring(loss_curve(curve, marks=inside))
    for line in root.iter(f"{SVG}polyline"):
        for point in (line.get("points") or "").split():
            x, y = map(float, point.split(","))
            assert LEFT - 0.01 <= x <= WIDTH - RIGHT + 0.01
            assert y >= TOP - 0.01


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.integers(2, 12))
def test_ticks_enclose_and_are_few(low: float, span: float, count: int) -> None:
    ticks = _ticks(low, low + span, count)
    slack = 1e-6 * max(1.0, abs(low), span)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + span - slack
    assert 2 <= len(ticks) <= count + 3
