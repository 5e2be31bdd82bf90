"""Samples of a masked language model: hidden tokens, which are the targets (BERT, arXiv 1810.04805)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hetpeer.bootstrap.samples.packing import IDS, LABELS
from hetpeer.stages.data.extremes import IGNORED
from hetpeer.stages.data.shards import Arrays

CHOSEN = 0.15
"""Share of a sample's tokens that are targets."""
HIDDEN, RANDOM = 0.8, 0.1
"""Shares of the targets that show the mask token, and a random token; the others show themselves."""


def hidden(
    samples: Iterable[Arrays], *, mask: int, special: Sequence[int], vocabulary: int, seed: int
) -> Iterator[Arrays]:
    """`samples` with hidden tokens; `labels` has the ids of the targets, and -100 elsewhere.

    Each sample has at least one target; its number seeds its draws. Special tokens and padding are never
    targets.
    """
    for number, sample in enumerate(samples):
        draw = np.random.default_rng([seed, number])
        ids = sample[IDS].copy()
        places = np.flatnonzero((sample[LABELS] != IGNORED) & ~np.isin(ids, special))
        if not len(places):
            continue
        chosen = places[draw.random(len(places)) < CHOSEN]
        if not len(chosen):
            chosen = draw.choice(places, 1)
        labels = np.full_like(ids, IGNORED)
        labels[chosen] = ids[chosen]
        how = draw.random(len(chosen))
        ids[chosen[how < HIDDEN]] = mask
        changed = chosen[(how >= HIDDEN) & (how < HIDDEN + RANDOM)]
        ids[changed] = draw.integers(0, vocabulary, len(changed))
        yield {**sample, IDS: ids, LABELS: labels}
