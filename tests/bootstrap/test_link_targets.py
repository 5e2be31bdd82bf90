"""Targets of links, and how far it pays to shrink them."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.bootstrap.state import link_targets as module
from hetpeer.bootstrap.state.link_targets import RatioChoice, link_targets
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.stages.links.token_prices import PRICES, log_price
from hetpeer.stages.planning.swarms.plan_inputs import Compression


def stages(**computing: float) -> list[VolunteerState]:
    """Two stages: names with a have the first block, with b the second.

    Each knows its links, of a fifth of a second.
    """
    found = []
    for name, seconds in computing.items():
        one = VolunteerState(name, 1, 0.0, place=(0, 1) if name[0] == "a" else (1, 2), computing=seconds)
        one.links = {other: 0.2 for other in computing if other[0] != name[0]}
        found.append(one)
    return found


def test_a_slow_one_among_several_lets_nobody_elses_links_be_slow() -> None:
    """It does a thirtieth of the microbatches.

    Once all links aimed at its ten seconds, and nothing was compressed.
    """
    ready = stages(a1=1.0, a2=1.0, a3=10.0, b1=1.0, b2=1.0, b3=1.0)
    found = link_targets(ready, 10.0)
    assert found["a1"] == found["a2"] == pytest.approx(1.0)
    assert found["a3"] == pytest.approx(10.0), "its own may take as long as it does"
    assert found["b1"] == pytest.approx(3.0 / 2.1), "the first stage has 2.1 a second for the three of them"
    ready[2].computing = 1e-9
    assert link_targets(ready, 10.0)["a1"] == pytest.approx(1.0), (
        "no link is to take longer than the slowest computes"
    )
    ready[2].computing, ready[5].computing = 0.01, 4.0
    assert link_targets(ready, 10.0)["a1"] > 3.0, "it seems to do nearly all"
    assert link_targets(ready, 10.0, limited={"a3"})["a1"] == pytest.approx(2.0 / 2.0)


def test_who_alone_has_a_block_decides_for_all() -> None:
    found = link_targets(stages(a1=10.0, b1=1.0, b2=1.0), 10.0)
    assert found == {"a1": pytest.approx(10.0), "b1": pytest.approx(10.0), "b2": pytest.approx(10.0)}


def test_of_several_lines_the_best_counts_and_none_is_shrunk_further_than_the_author_allows() -> None:
    ready = stages(a1=0.1, b1=0.1, b2=0.1)
    ready[0].links = {"b1": 5.0, "b2": 50.0}
    assert link_targets(ready, 10.0)["a1"] == pytest.approx(0.5)


def test_nothing_is_known_before_a_line_was_measured_and_unknown_ones_are_like_the_others() -> None:
    ready = stages(a1=1.0, b1=2.0, b2=0.0)
    assert link_targets(ready, 10.0)["b2"] == pytest.approx(
        link_targets(stages(a1=1.0, b1=2.0, b2=1.5), 10.0)["b2"]
    )
    for one in ready:
        one.links = {}
    assert link_targets(ready, 10.0) == {}
    assert link_targets([], 10.0) == {}


# ── the ratio that pays ─────────────────────────────────────────────────────────────────────────────────────


def pipeline(lines: list[float], computing: list[float]) -> list[VolunteerState]:
    """Volunteers in a row; `lines`: seconds of the line from each to the next, uncompressed."""
    found = []
    for number, seconds in enumerate(computing):
        one = VolunteerState(str(number), 1, 0.0, place=(number, number + 1), computing=seconds)
        if number < len(lines):
            one.links[str(number + 1)] = lines[number]
        if number:
            one.links[str(number - 1)] = lines[number - 1]
        found.append(one)
    return found


def time_to_loss(lines: list[float], computing: list[float], ratio: float) -> float:
    """Time to a loss of a pipeline: seconds of its slowest part times the price of all borders."""
    period = max(*computing, max(lines) / ratio)
    return period * math.exp(sum(log_price(max(seconds / period, 1.0)) for seconds in lines))


@given(
    st.lists(st.floats(0.01, 50.0), min_size=1, max_size=6),
    st.floats(0.05, 5.0),
    st.floats(1.0, 300.0),
)
def test_no_other_ratio_takes_less_time_to_a_loss(lines: list[float], work: float, most: float) -> None:
    computing = [work] * (len(lines) + 1)
    found = RatioChoice().choose(pipeline(lines, computing), most)
    assert 1.0 <= found <= most
    others = [most ** (number / 500) for number in range(501)]
    best = min(time_to_loss(lines, computing, ratio) for ratio in others)
    assert time_to_loss(lines, computing, found) <= 1.1 * best, "ratios lie a fifth apart"


def test_a_fast_line_is_left_alone_and_a_slow_one_is_shrunk_until_it_keeps_up() -> None:
    choice = RatioChoice()
    assert choice.choose(pipeline([0.1, 0.5], [1.0] * 3), 100.0) == 1.0
    ready = pipeline([5.0, 5.0], [1.0] * 3)
    assert choice.choose(ready, 100.0) == pytest.approx(5.0), "rounding is cheap"
    assert link_targets(ready, choice.ratio) == pytest.approx(dict.fromkeys("012", 1.0))


def test_what_costs_more_tokens_than_it_saves_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A price that grows as fast as the time falls is not paid; one of nothing always is."""
    ready = pipeline([50.0, 50.0], [1.0] * 3)
    monkeypatch.setattr(module, "log_price", lambda ratio: 0.6 * max(math.log(ratio / 8.0), 0.0))
    assert RatioChoice().choose(ready, 100.0) == pytest.approx(8.0, rel=0.15)
    monkeypatch.setattr(module, "log_price", lambda ratio: 0.0)
    assert RatioChoice().choose(ready, 100.0) == pytest.approx(50.0), "FusionLLM's rule, down to the work"
    monkeypatch.setattr(module, "log_price", lambda ratio: math.log(2.0) if ratio > 1.0 else 0.0)
    assert RatioChoice().choose(pipeline([1.5], [1.0] * 2), 100.0) == 1.0


def test_codecs_bound_the_ratio_and_links_that_do_not_adapt_have_the_authors() -> None:
    ready = pipeline([50.0, 50.0], [1.0] * 3)
    int8 = Compression(forward=3.97, backward=3.97, adaptive=True)
    assert RatioChoice().targets(ready, 100.0, int8)["0"] == pytest.approx(50.0 / 3.97)
    warm = RatioChoice().targets(ready, 4.0, Compression(forward=100.0, backward=100.0, adaptive=True))
    assert warm["0"] == pytest.approx(50.0 / 4.0)
    uniform = RatioChoice().targets(ready, 100.0, Compression(forward=3.97, backward=3.97))
    assert uniform == link_targets(ready, 100.0)


def test_noise_does_not_change_the_ratio() -> None:
    draw, choice = random.Random(3), RatioChoice()
    found = {
        choice.choose(pipeline([draw.uniform(29, 31) for _ in range(3)], [1.0] * 4), 100.0) for _ in range(50)
    }
    assert len(found) == 1


def test_a_line_ten_times_as_slow_changes_it_at_once() -> None:
    choice = RatioChoice()
    before = choice.choose(pipeline([4.0], [1.0] * 2), 100.0)
    after = choice.choose(pipeline([40.0], [1.0] * 2), 100.0)
    assert after > 2 * before
    assert choice.choose(pipeline([40.0], [1.0] * 2), 6.0) == 6.0, "the author's bound, as in a warm-up"


def test_unknown_lines_and_unknown_work_leave_the_bound() -> None:
    for ready in ([], pipeline([], [1.0]), pipeline([0.0], [1.0] * 2), pipeline([5.0], [0.0] * 2)):
        choice = RatioChoice()
        assert choice.choose(ready, 70.0) == 70.0
        assert choice.ratio == 0.0


def test_prices_rise_and_are_read_between_measurements() -> None:
    assert [log_price(ratio) for ratio in (0.5, 1.0)] == [0.0, 0.0]
    grid = [log_price(1.05**number) for number in range(120)]
    assert grid == sorted(grid)
    for ratio, price in PRICES:
        assert math.exp(3 * log_price(ratio)) == pytest.approx(price)
