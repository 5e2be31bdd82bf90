"""The scan of state-space models: one operator with the bits of the loop, for any number of steps."""

import pytest
import torch

from hetpeer.stages.graph.block_spec import OperatorCall, Ref, TensorSpec
from hetpeer.stages.graph.graph_cost import CallFlops, call_flops, measure
from hetpeer.stages.operators.scan_operators import LINEAR_SCAN, MAX_STEPS, linear_scan


def loop(factors, terms, dim):
    """The loop of transformers' Mamba."""
    state = torch.zeros_like(terms.select(dim, 0))
    states = []
    for step in range(terms.shape[dim]):
        state = factors.select(dim, step) * state + terms.select(dim, step)
        states.append(state)
    return torch.stack(states, dim=dim)


def outcome(scan, factors, terms, weights, dim):
    factors, terms = factors.clone().requires_grad_(), terms.clone().requires_grad_()
    states = scan(factors, terms, dim)
    states.backward(weights)
    return states.detach(), factors.grad, terms.grad


@pytest.mark.parametrize(("shape", "dim"), [((3, 5, 17, 4), 2), ((2, 9, 8), 1), ((6,), -1), ((2, 1, 3), 1)])
def test_results_and_gradients_have_the_bits_of_the_loop(shape, dim):
    torch.manual_seed(7)
    factors, terms, weights = torch.rand(shape), torch.randn(shape), torch.randn(shape)
    ours = outcome(linear_scan, factors, terms, weights, dim)
    loops = outcome(loop, factors, terms, weights, dim)
    assert all(mine.equal(its) for mine, its in zip(ours, loops, strict=True))


def test_factors_may_be_constants():
    factors, terms = torch.rand(2, 5), torch.randn(2, 5, requires_grad=True)
    linear_scan(factors, terms, 1).sum().backward()
    assert terms.grad is not None


@pytest.mark.parametrize(
    ("factors", "terms", "dim"),
    [
        (torch.ones(MAX_STEPS + 1, device="meta"), torch.ones(MAX_STEPS + 1, device="meta"), 0),
        (torch.ones(0), torch.ones(0), 0),
        (torch.ones(3), torch.ones(2, 3), 1),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), 0),
        (torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64), 0),
        (torch.ones(3), torch.ones(3), 1),
        (torch.ones(3), torch.ones(3), True),
    ],
)
def test_a_scan_without_bound_or_sense_is_refused(factors, terms, dim):
    with pytest.raises(ValueError, match="a scan"):
        linear_scan(factors, terms, dim)


def test_a_scan_counts_two_flops_an_element():
    specs = {name: TensorSpec(shape=(2, 5), dtype="float32", grad=True) for name in ("a", "b")}
    call = OperatorCall(name="h", op=LINEAR_SCAN, args=(Ref("a"), Ref("b"), 1), kwargs={})
    assert measure([call], specs).flops == {"h": 20}
    assert call_flops(call, specs) == CallFlops(forward=20, backward=40, formula=False)
