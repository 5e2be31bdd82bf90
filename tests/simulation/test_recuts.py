"""Seeded histories in which living clusters are divided anew again and again (docs/grouped.md, "Living
clusters").
"""

from collections import Counter
from dataclasses import replace
from itertools import islice
from unittest.mock import patch

import pytest

from hetpeer.bootstrap.grouped.recut import Recutting
from tests.amounts import mostly_proof
from tests.simulation.histories import shape
from tests.simulation.sim_grouped import simulate

VOLUNTEERS, BATCHES, PERIOD_S = 8, 20, 4.0
"""Volunteers and batches of each history, and seconds between two proposals of new clusters."""
SOON_S = 15.0
"""In the histories a batch takes about a second."""


def history(seed, faults=2):
    config = replace(shape(seed), steps=BATCHES, arranged_s=PERIOD_S, volunteers=VOLUNTEERS)
    return simulate(seed, faults=faults, config=config)


def seen(seeds, **named):
    """Outcomes of histories, counts of what became of proposals, and seconds of those that took effect."""
    counts, took, since = Counter(), [], {}

    def propose(self, recut, now, original=Recutting.propose):
        counts["proposed"] += 1
        since[id(self)] = now
        original(self, recut, now)

    def due(self, waiting, now, original=Recutting.due):
        recut = original(self, waiting, now)
        if recut is not None:
            took.append(now - since[id(self)])
        return recut

    with patch.object(Recutting, "propose", propose), patch.object(Recutting, "due", due):
        outcomes = [history(seed, **named) for seed in seeds]
    return outcomes, counts, took


def test_most_divisions_take_effect_soon():
    """Clusters average in groups of their own choice, at intervals of one and three batches."""
    outcomes, counts, took = seen(range(8))
    assert [outcome.violation for outcome in outcomes] == [None] * len(outcomes)
    assert counts["proposed"] >= 20
    assert len(took) >= 0.6 * counts["proposed"]
    assert max(took) < SOON_S


@pytest.mark.parametrize("count", mostly_proof([2, 60], [2]))
def test_histories_with_faults_keep_every_invariant(count):
    outcomes, _, took = seen(range(100, 100 + count), faults=20)
    assert [outcome for outcome in outcomes if outcome.violation] == []
    assert took


def selfish(self, original=Recutting.together):
    """The cluster that stays is left out of the averaging, so nobody has what retires."""
    return original(self)[:-1]


@pytest.mark.proof
def test_a_seeded_bug_is_caught_three_times():
    with patch.object(Recutting, "together", selfish):
        broken = (seed for seed in range(16) if history(seed).caught)
        assert len(list(islice(broken, 3))) == 3
