"""Checks of sanity in a model, which raise for bad values: while tracing they pass.

`if labels.max() >= classes: raise …` and `assert x.isfinite().all()` decide nothing but whether there is an
error, so the graph leaves them out. The eager module evaluates them on the first microbatch, when `init`
compares it with the blocks. A decision by a tensor's value that takes another path is refused as before.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import logging
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def checks_pass() -> Iterator[None]:
    """Let each check of sanity pass; `bool` and `item` of a tensor anywhere else stay torch's."""
    torch_bool, torch_item = Tensor.__bool__, Tensor.item

    def decide(tensor: Tensor) -> bool:
        passing = _passing(sys._getframe(1), items=False)  # noqa: SLF001 (the only way to the line that asks)
        return torch_bool(tensor) if passing is None else passing

    def item(tensor: Tensor) -> bool | int | float:
        passing = None
        if tensor.dtype is torch.bool:
            passing = _passing(sys._getframe(1), items=True)  # noqa: SLF001
        return torch_item(tensor) if passing is None else passing

    Tensor.__bool__, Tensor.item = decide, item  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tensor.__bool__, Tensor.item = torch_bool, torch_item  # type: ignore[method-assign]


def _passing(caller: FrameType, *, items: bool) -> bool | None:
    """`passing_value` for the line that a caller is at."""
    file, line = caller.f_code.co_filename, caller.f_lineno
    passing = passing_value(file, line, items=items)
    if passing is not None:
        _log.debug("a check of sanity is left out: %s:%d", file, line)
    return passing


def passing_value(file: str, line: int, *, items: bool = False) -> bool | None:
    """Value of the tensor that the check in this line asks for, such that it raises nothing.

    With `items` only checks whose conditions are `x.item()`, not compared with anything, count.
    None if there is no check in the line, or none as simple as its promise: one condition, or several of the
    same sense.
    """
    for first, last, value, asks_items in _checks(file):
        if first <= line <= last and (asks_items or not items):
            return value
    return None


@lru_cache(256)
def _checks(file: str) -> tuple[tuple[int, int, bool, bool], ...]:
    """(first line, last line, passing value, whether it asks `x.item()`) of all checks in a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            value = _needed(node.test, True)
        elif (
            isinstance(node, ast.If)
            and not node.orelse
            and all(isinstance(one, ast.Raise) for one in node.body)
        ):
            value = _needed(node.test, False)
        else:
            continue
        if value is not None:
            last = node.test.end_lineno or node.test.lineno
            found.append((node.test.lineno, last, value, _asks_items(node.test)))
    return tuple(found)


def _needed(test: ast.expr, wanted: bool) -> bool | None:
    """Value of the tensors in a condition that makes it `wanted`; None if they would differ."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _needed(test.operand, not wanted)
    if not isinstance(test, ast.BoolOp):
        return wanted
    parts = [one for one in test.values if not _is_plain(one)]
    if isinstance(test.op, ast.And) is wanted or len(parts) == 1:  # all of them, or the only one
        values = {_needed(one, wanted) for one in parts}
        return values.pop() if len(values) == 1 else None
    return None


def _asks_items(test: ast.expr) -> bool:
    """Whether a condition is `x.item()`, or made of such by `not`, `and`, `or`."""
    if isinstance(test, ast.UnaryOp):
        return _asks_items(test.operand)
    if isinstance(test, ast.BoolOp):
        return all(_asks_items(one) for one in test.values if not _is_plain(one))
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr == "item"


def _is_plain(test: ast.expr) -> bool:
    """Whether a condition asks for no tensor's value: `x is not None`; a name may be a tensor."""
    return isinstance(test, ast.Constant) or (
        isinstance(test, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops)
    )
