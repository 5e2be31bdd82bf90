"""Link targets: the time between two microbatches of a link's sender."""

import pytest

from hetpeer.bootstrap.state.link_costs import link_targets
from hetpeer.bootstrap.state.membership import VolunteerState


def swarm(**computing: float) -> list[VolunteerState]:
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
    ready = swarm(a1=1.0, a2=1.0, a3=10.0, b1=1.0, b2=1.0, b3=1.0)
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
    found = link_targets(swarm(a1=10.0, b1=1.0, b2=1.0), 10.0)
    assert found == {"a1": pytest.approx(10.0), "b1": pytest.approx(10.0), "b2": pytest.approx(10.0)}


def test_of_several_lines_the_best_counts_and_none_is_shrunk_further_than_the_author_allows() -> None:
    ready = swarm(a1=0.1, b1=0.1, b2=0.1)
    ready[0].links = {"b1": 5.0, "b2": 50.0}
    assert link_targets(ready, 10.0)["a1"] == pytest.approx(0.5)


def test_nothing_is_known_before_a_line_was_measured_and_unknown_ones_are_like_the_others() -> None:
    ready = swarm(a1=1.0, b1=2.0, b2=0.0)
    assert link_targets(ready, 10.0)["b2"] == pytest.approx(
        link_targets(swarm(a1=1.0, b1=2.0, b2=1.5), 10.0)["b2"]
    )
    for one in ready:
        one.links = {}
    assert link_targets(ready, 10.0) == {}
    assert link_targets([], 10.0) == {}
