"""The outer optimizer is DiLoCo's where everybody averages with everybody, and brings clusters together
where not.
"""

import itertools

import pytest
import torch

from hetpeer.averaging.optim.outer_optimizer import outer_of
from hetpeer.dht.base.errors import LocalError

SIZE = 1000
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
