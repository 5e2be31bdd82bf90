"""The 2-norm by which the author's module is compared with its blocks."""

import math

import pytest
import torch

from hetpeer.bootstrap.model_checks.two_norm import two_norm


def test_a_large_table_is_added_up_exactly():
    table = torch.randn(20_000, 800, generator=torch.Generator().manual_seed(1))
    exact = float(table.double().norm())
    assert two_norm([table]) == pytest.approx(exact, rel=1e-7)


def test_all_tensors_count_whatever_their_shape():
    parts = [torch.full((2, 2), 2.0), torch.full((), 3.0), torch.zeros(0), torch.zeros(0, 3), torch.ones(11)]
    assert two_norm(parts) == pytest.approx(6.0)
    assert two_norm([]) == 0.0
    assert math.isnan(two_norm([torch.tensor([1.0, math.nan])]))
