"""Ravnest's formation of clusters, written anew from its paper (Menon et al., arXiv 2401.01728, 3.5.2): a
genetic search for clusters whose sums of memory over bandwidth are as equal as possible.

A clustering gives each node a cluster. Clusters need memory for the model together. The fitness is the
difference of the largest and the smallest sum. One cluster of all would be perfect, so the number of clusters
is given: as many as can hold the model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

POPULATION, GENERATIONS, MUTATED = 60, 200, 0.1
Clustering = NDArray[np.intp]
Floats = NDArray[np.float64]


def genetic(memory: Floats, rate: Floats, needed: float, seed: int) -> Clustering | None:
    """Node → cluster, for as many clusters as the search finds memory for; None: not even one.

    `memory` (N) and `needed` in bytes, `rate` (N) in bytes/s.
    """
    for clusters in range(min(len(memory), int(memory.sum() // needed)), 0, -1):
        found = _balanced(memory, rate, needed, clusters, np.random.default_rng([seed, clusters]))
        if found is not None:
            return found
    return None


def _balanced(
    memory: Floats, rate: Floats, needed: float, clusters: int, random: np.random.Generator
) -> Clustering | None:
    """The best of the last generation with so many clusters, if it has the memory."""

    def rated(population: Clustering) -> tuple[Floats, Floats]:
        """(bytes that are missing, difference of the sums in seconds) of each clustering: less is better."""
        inside = np.eye(clusters)[population]
        """[clustering, node, cluster]."""
        seconds = np.einsum("pnc,n->pc", inside, memory / rate)
        missing = np.maximum(needed - np.einsum("pnc,n->pc", inside, memory), 0.0).sum(axis=1)
        return missing, seconds.max(axis=1) - seconds.min(axis=1)

    def ranked(population: Clustering) -> Clustering:
        """The clusterings, the best first."""
        missing, balance = rated(population)
        return population[np.lexsort((balance, missing))]

    population = random.integers(clusters, size=(POPULATION, len(memory)))
    for _ in range(GENERATIONS):
        parents = ranked(population)[: POPULATION // 2]
        pairs = parents[random.integers(len(parents), size=(2, POPULATION - len(parents)))]
        taken = random.random(pairs.shape[1:]) < 0.5
        children = np.where(taken, pairs[0], pairs[1])
        mutated = random.random(children.shape) < MUTATED
        children[mutated] = random.integers(clusters, size=int(mutated.sum()))
        population = np.concatenate([parents, children])
    best = ranked(population)[:1]
    return None if rated(best)[0][0] else best[0]
