"""Backward passes from given gradients: those of torch, without what torch imports for them."""

import os
import subprocess
import sys

import torch

from hetpeer.stages.block.block import backpropagate

ALONE = """
import sys, torch
from hetpeer.stages.block.block import backpropagate
x = torch.ones(2, 2, requires_grad=True)
assert torch.equal(backpropagate([x * 3], [x], [torch.ones(2, 2)])[0], torch.full((2, 2), 3.0))
assert "sympy" not in sys.modules
"""


def test_bit_for_bit_those_of_torch():
    """Of outputs that go into each other, of several types and shapes, one of which reaches nothing."""
    generator = torch.Generator().manual_seed(1)

    def made(*shape, **how):
        return torch.randn(*shape, generator=generator).to(**how).requires_grad_()

    x, weight, unused = made(3, 4), made(4, 5), made(2)
    outputs = [x @ weight, (x @ weight).tanh(), x.bfloat16() * 2, (x @ weight).sum()]
    outputs.append(outputs[1] * outputs[0])
    constant = torch.ones(3)
    seeds = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in (*outputs, constant)]
    found = backpropagate([*outputs, constant], [x, weight, unused], seeds)
    outputs = [x @ weight, (x @ weight).tanh(), x.bfloat16() * 2, (x @ weight).sum()]
    outputs.append(outputs[1] * outputs[0])
    expected = torch.autograd.grad(outputs, [x, weight, unused], seeds[:-1], allow_unused=True)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2] is None


def test_a_worker_is_spared_the_import():
    subprocess.run([sys.executable, "-c", ALONE], check=True, env=os.environ | {"PYTHONPATH": "."})
