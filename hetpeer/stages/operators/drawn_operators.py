"""Random numbers that a model asks for besides dropout: each is a function of its place in the run.

`number` is the draw's place among all draws of the author's program (docs/graph.md), as for dropout. An
evaluation draws the same numbers each time, but what decides whether a path is kept is then its probability.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetpeer.stages.operators import random_draws
from hetpeer.stages.operators.operator_family import Operator, is_abstract
from hetpeer.stages.operators.own_operators import MAX_OPERATORS, Pass
from hetpeer.stages.operators.random_draws import Draw

UNIFORM, NORMAL, EXPONENTIAL = "hetpeer.uniform", "hetpeer.normal", "hetpeer.exponential"
KEEP, BERNOULLI = "hetpeer.keep", "hetpeer.bernoulli"
EVALUATION = Draw(seed=0, step=0, microbatch=0, microbatches=1)


def _filled(drawn: Callable[..., Any]) -> Callable[..., Tensor]:
    """The operator that fills a float32 tensor of `sizes` with `drawn(draw, number, count)`."""

    def run(here: Pass, _name: str, sizes: Sequence[int], number: int, *, device: torch.device) -> Tensor:
        _check_number(number)
        result = torch.empty(tuple(sizes), device=device)
        if is_abstract(result):
            return result
        draws = drawn(here.draw or EVALUATION, number, result.numel())
        return torch.from_numpy(draws).view(result.shape).to(device)

    return run


uniform = _filled(random_draws.uniform)


def keep(
    here: Pass, name: str, sizes: Sequence[int], probability: float, number: int, *, device: torch.device
) -> Tensor:
    """`floor(probability + uniform)`: 1 with `probability`, else 0; an evaluation has `probability`."""
    _check_probability(probability)
    drawn = uniform(here, name, sizes, number, device=device)
    return torch.full_like(drawn, probability) if here.draw is None else (drawn + probability).floor()


def bernoulli(
    here: Pass, _name: str, sizes: Sequence[int], probability: float, number: int, *, device: torch.device
) -> Tensor:
    """1 with `probability`, else 0, float32; an evaluation has `probability`."""
    _check_number(number)
    _check_probability(probability)
    result = torch.full(tuple(sizes), float(probability), device=device)
    if here.draw is None or is_abstract(result):
        return result
    mask = random_draws.keep_mask(here.draw, number, 1.0 - probability, result.numel())
    return torch.from_numpy(mask).view(result.shape).to(device, torch.float32)


def _check_number(number: int) -> None:
    if type(number) is not int or not 0 <= number < MAX_OPERATORS:
        raise ValueError(f"a draw takes its number in the program, not {number!r}")


def _check_probability(probability: float) -> None:
    if type(probability) not in (int, float) or not 0 <= probability <= 1:
        raise ValueError(f"a draw takes a probability in [0, 1], not {probability!r}")


FAMILY: Mapping[str, Operator] = {
    UNIFORM: Operator(uniform, in_pass=True, factory=True),
    NORMAL: Operator(_filled(random_draws.normal), in_pass=True, factory=True),
    EXPONENTIAL: Operator(_filled(random_draws.exponential), in_pass=True, factory=True),
    KEEP: Operator(keep, in_pass=True, factory=True),
    BERNOULLI: Operator(bernoulli, in_pass=True, factory=True),
}
