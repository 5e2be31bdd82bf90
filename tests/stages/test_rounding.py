"""What rounding changes, as a checker measures it: all of a gradient that has vanished, else very little."""

import pytest
import torch
from torch import nn

from hetpeer.stages.block.rounding import ROOM, UNIT
from hetpeer.stages.worker.exact_operators import RoundedOnce

WIDTH = 32


def gradient(net, inputs, targets):
    loss = nn.functional.mse_loss(net(inputs), targets)
    found = torch.autograd.grad(loss, list(net.parameters()))
    return torch.cat([part.flatten() for part in found])


def length(vector):
    return float(torch.linalg.vector_norm(vector.double()))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


@pytest.mark.parametrize(("fits", "least", "most"), [(False, 0.0, 1e-5), (True, 0.1, 100.0)])
def test_rounding_is_measured_by_operators_that_round_once(net, fits, least, most):
    """A net that fits its data has a gradient of rounding noise alone; the truth is the same in float64."""
    inputs = torch.randn(4, WIDTH)
    with torch.no_grad():
        exact = net.double()(inputs.double()).float()
    net = net.float()
    targets = exact if fits else torch.randn(4, WIDTH)
    own = gradient(net, inputs, targets)
    with RoundedOnce():
        again = gradient(net, inputs, targets)
    measured = length(own - again)
    truth = gradient(net.double(), inputs.double(), targets.double())
    assert again.dtype == own.dtype == torch.float32
    assert least <= measured / length(own) <= most
    assert length(own - truth) <= ROOM * (measured + UNIT * length(own))


def test_views_and_changes_in_place_stay_what_they_are():
    with RoundedOnce():
        vector = torch.zeros(4)
        vector[1:3].add_(1.0)
        assert vector.tolist() == [0.0, 1.0, 1.0, 0.0]
        values, places = torch.tensor([1.0, 3.0, 2.0]).max(0)
    assert (values.item(), places.item()) == (3.0, 1)
    third = torch.tensor(1.0)
    with RoundedOnce():
        assert (third / 3).dtype == torch.float32
        assert torch.zeros(2, dtype=torch.bfloat16).sum().dtype == torch.bfloat16
