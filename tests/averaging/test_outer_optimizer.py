"""The outer optimizer is DiLoCo's where everybody averages with everybody, and brings clusters together
where not.
"""

import itertools

import pytest
import torch

from hetpeer.averaging.optim.outer_optimizer import outer_of
from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.links.sparse_movement import TopK2
from hetpeer.stages.worker.movement_sums import summed_movements

SIZE = 1000
CODEC = TopK2()
DILOCO = {"learning_rate": 0.7, "momentum": 0.9}


class Cluster:
    def __init__(self, parameters):
        self.rule = outer_of(DILOCO)
        self.parameters = parameters.clone()
        self.state = {name: torch.zeros(SIZE) for name in ("outer_anchor", "outer_momentum")}
        self.rule.begin(parameters=self.parameters, state=self.state)

    def install(self, mean):
        self.parameters.copy_(mean)
        self.rule.apply(parameters=self.parameters, state=self.state)


def average(clusters):
    mean = sum(one.parameters for one in clusters) / len(clusters)
    for one in clusters:
        one.install(mean)


def test_it_is_torchs_nesterov_over_what_all_have_moved():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(SIZE, generator=generator)
    clusters, theirs = [Cluster(start) for _ in range(3)], start.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(20):
        moves = [torch.randn(SIZE, generator=generator) * 0.1 for _ in clusters]
        for one, move in zip(clusters, moves, strict=True):
            one.parameters.add_(move)
        theirs.grad = -sum(moves) / len(moves)
        optimizer.step()
        average(clusters)
    assert len({one.parameters.numpy().tobytes() for one in clusters}) == 1
    assert (clusters[0].parameters - theirs.detach()).abs().max() <= 1e-5


def test_clusters_that_average_in_changing_pairs_come_together():
    generator = torch.Generator().manual_seed(0)
    clusters = [Cluster(torch.randn(SIZE, generator=generator)) for _ in range(4)]
    first = spread(clusters)
    for number, pair in enumerate(itertools.cycle([(0, 1), (2, 3), (1, 2), (3, 0)])):
        average([clusters[place] for place in pair])
        if number == 100:
            break
    assert spread(clusters) < 1e-3 * first


def spread(clusters):
    together = torch.stack([one.parameters for one in clusters])
    return float((together - together.mean(0)).norm())


@pytest.mark.parametrize("wrong", [{"momentum": 1.0}, {"learning_rate": 0.0}, {"learning_rate": "0.7"}])
def test_a_wrong_setting_is_named(wrong):
    with pytest.raises(LocalError, match=rf"HP-RUN-001: .* optimizer\.{next(iter(wrong))}"):
        outer_of(DILOCO | wrong)


class SparseCluster:
    """A cluster that sends its movements in the codec of movements."""

    def __init__(self, parameters, settings=DILOCO):
        self.rule = outer_of(settings | {"sparse": True})
        self.parameters = parameters.clone()
        self.state = {name: torch.zeros(len(parameters)) for name in ("outer_anchor", "outer_momentum")}
        self.rule.begin(parameters=self.parameters, state=self.state)

    def sends(self):
        moved = self.rule.moved(parameters=self.parameters, state=self.state)
        data = memoryview(bytearray(CODEC.nbytes(len(moved))))
        CODEC.encode(moved, data)
        return CODEC.decode(data, len(moved))

    def follow(self, sent, total, share):
        self.rule.follow(parameters=self.parameters, state=self.state, sent=sent, total=total, share=share)


def average_sparsely(clusters):
    parts = [one.sends() for one in clusters]
    total = summed_movements(parts)
    for one, sent in zip(clusters, parts, strict=True):
        one.follow(sent, total, 1 / len(clusters))
    return parts


def test_sparse_clusters_have_one_anchor_and_keep_what_nobody_has_sent():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2 * SIZE + 3000, generator=generator)
    clusters = [SparseCluster(start) for _ in range(3)]
    for _ in range(10):
        for one in clusters:
            one.parameters.add_(torch.randn(len(start), generator=generator) * 0.1)
        before = [one.rule.moved(parameters=one.parameters, state=one.state) for one in clusters]
        parts = average_sparsely(clusters)
        for name in ("outer_anchor", "outer_momentum"):
            assert len({one.state[name].numpy().tobytes() for one in clusters}) == 1
        by_anybody = torch.stack(parts).ne(0).any(0)
        assert 0 < by_anybody.sum() < len(start)
        for one, moved, sent in zip(clusters, before, parts, strict=True):
            left = one.rule.moved(parameters=one.parameters, state=one.state)
            assert not left[by_anybody & sent.eq(0)].any(), "others have sent something in its place"
            assert torch.allclose(left[~by_anybody], moved[~by_anybody], atol=1e-6)
            assert torch.allclose(left[sent.ne(0)], (moved - sent)[sent.ne(0)], atol=1e-6)


def test_what_is_not_sent_now_is_sent_later():
    """A cluster alone goes where it goes, and without momentum its anchor comes after."""
    generator = torch.Generator().manual_seed(0)
    (one,) = clusters = [SparseCluster(torch.zeros(SIZE), {"learning_rate": 1.0, "momentum": 0.0})]
    moved = torch.zeros(SIZE)
    for _ in range(60):
        move = torch.randn(SIZE, generator=generator) * 0.01
        moved += move
        one.parameters.add_(move)
        average_sparsely(clusters)
    assert (one.parameters - moved).abs().max() < 1e-5
    for _ in range(40):
        average_sparsely(clusters)
    assert (one.state["outer_anchor"] - moved).abs().max() < 0.02


def distances_after(minima, noise):
    """Distances of sparse clusters from the mean of `minima`, one of each, after many steps towards them."""
    generator = torch.Generator().manual_seed(1)
    clusters = [SparseCluster(torch.zeros(SIZE), {"learning_rate": 1.0, "momentum": 0.0}) for _ in minima]
    for outer in range(400):
        for one, minimum in zip(clusters, minima, strict=True):
            for _ in range(5):
                drawn = minimum + noise * torch.randn(SIZE, generator=generator)
                one.parameters.add_((drawn - one.parameters) * 0.01 * (1 - outer / 400))
        average_sparsely(clusters)
    together = sum(minima) / len(minima)
    return [float((one.parameters - together).norm()) for one in clusters]


def test_sparse_clusters_reach_the_minimum_that_they_all_seek():
    """Each sees it with noise of its own, five times as large as the way to it."""
    minimum = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    assert max(distances_after([minimum] * 4, 5.0)) < 0.2 * minimum.norm()


def test_sparse_clusters_with_different_minima_end_between_them():
    """Not in the middle: a number that one has moved far counts for more than three that have moved less."""
    generator = torch.Generator().manual_seed(0)
    minima = [torch.randn(SIZE, generator=generator) for _ in range(4)]
    together = sum(minima) / len(minima)
    alone = min(float((minimum - together).norm()) for minimum in minima)
    assert max(distances_after(minima, 0.0)) < 0.4 * alone
