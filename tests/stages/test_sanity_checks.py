"""Checks that only raise are left out of the trace; any other decision by a value is refused."""

import pytest
import torch
from torch import nn

from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.stand_ins.sanity_checks import checks_pass
from hetpeer.stages.tracing.trace import trace
from tests.stages.split_run import assert_same_step, eager_step, split_step


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if y is not None and y.max() >= 4:
            raise ValueError("a label is beyond the classes")
        if not torch.isfinite(x).all() or not (x.abs() < 1e6).all():
            raise ValueError("not finite")
        logits = self.linear(x)
        assert not logits.isnan().any()
        assert torch.all(y >= 0).item(), "a label is negative"
        return nn.functional.cross_entropy(logits, y)


class Deciding(Checked):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if y.max() >= 3:
            x = -x
        return super().forward(x, y)


def data(samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(samples, 8), "y": torch.randint(0, 4, (samples,))}


def test_a_model_with_checks_is_traced_without_them():
    torch.manual_seed(1)
    model, batches = Checked(), [data(4), data(3)]
    dag = trace(model, batches[0])
    split = split_step(cut_blocks(dag, 1), [(0, 1)], dag.tensors, batches)
    assert_same_step(split, eager_step(model, batches), 1e-5)
    with pytest.raises(ValueError, match="beyond the classes"):  # eager code has its checks again
        model(torch.randn(1, 8), torch.tensor([4]))


def test_a_path_by_value_is_refused_with_its_line():
    with pytest.raises(LocalError, match=r"HP-MODEL-002.*if y\.max\(\) >= 3"):
        trace(Deciding(), data(4))


def test_conditions_of_both_senses_are_no_simple_check():
    good, bad = torch.tensor(True), torch.tensor(False)
    with checks_pass():
        if not good and bad:
            raise AssertionError
        if bad or not good:
            raise AssertionError
        with pytest.raises(AssertionError):
            assert bad.item() is True
    assert bool(good) is True
