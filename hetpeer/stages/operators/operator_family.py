"""An operator of a block's graph, and what checks, planners and the interpreter must know of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator that a block may call: `run(*args, **kwargs)`. Registered in operators.py.

    It is pure, and it refuses arguments whose cost is unbounded by a TypeError or ValueError: they come from
    a stranger (docs/extending.md).
    """

    run: Callable[..., Any]
    _: KW_ONLY
    moves: bool = False
    """The operator only rearranges elements: it counts no FLOPs."""
    work: int = 1
    """FLOPs for each element that it makes, if torch has no formula for it."""
    factory: bool = False
    """The operator makes a tensor from no tensor. The runner passes its `device`; in a dry run that
    keeps the operator from allocating. All others compute where their arguments are.
    """
    in_pass: bool = False
    """The operator takes the pass (own_operators.py) and the call's name before its arguments."""
    keywords: frozenset[str] = frozenset()
    """Arguments that it takes by name, besides those that any operator may take (interpreter.py)."""
    text: re.Pattern[str] | None = None
    """Free text that an argument may be, in full."""


def is_abstract(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values, as in a dry run."""
    return tensor.device.type == "meta" or isinstance(tensor, FakeTensor)


def aten(names: str, **traits: Any) -> dict[str, Operator]:
    """Operators of torch by their names in `torch.ops.aten`; in a graph they are called `aten.add.Tensor`."""
    found = {}
    for name in names.split():
        packet, overload = name.split(".")
        found[f"aten.{name}"] = Operator(getattr(getattr(torch.ops.aten, packet), overload), **traits)
    return found
