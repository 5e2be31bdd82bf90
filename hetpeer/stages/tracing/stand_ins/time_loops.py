"""Loops over time in libraries, traced as one scan instead of some calls for each step.

transformers has linear recurrences as Python loops. Mamba and its kin also have torch's associative scan,
which they leave out in an export. RecurrentGemma and RWKV have the loop alone; it is written out here by
scans. `init` compares the result with the library's own on the first microbatch.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetpeer.stages.operators.scan_operators import linear_scan

SCAN_MODULE = "torch._higher_order_ops.associative_scan"
EXPORTING = "is_torchdynamo_exporting"
"""Name of what keeps Mamba from torch's associative scan."""
LOWEST = -1e38
"""RWKV's first maximum."""
PROBES = ((2, 3), (5, 7)), ((11, 13), (17, 19))
"""Pairs (factor, term) of two following steps."""


@torch.library.custom_op("hetpeer::linear_scan", mutates_args=())
def _scan(factors: Tensor, terms: Tensor, dim: int) -> Tensor:
    return linear_scan(factors, terms, dim)


@_scan.register_fake
def _shape_of_scan(factors: Tensor, terms: Tensor, dim: int) -> Tensor:
    return linear_scan(factors, terms, dim)


@contextlib.contextmanager
def loops_as_scans() -> Iterator[None]:
    """Let torch's associative scan of a linear recurrence, and the libraries' loops, be ours."""
    own = importlib.import_module(SCAN_MODULE).associative_scan
    scan = _associative_scan(own)
    with contextlib.ExitStack() as stack:
        for file, module in list(sys.modules.items()):
            names = getattr(module, "__dict__", {})
            if names.get("associative_scan") is own:  # torch's modules, and those that import it from there
                _swap(stack, module, "associative_scan", scan)
            if (
                file.startswith("transformers.models.")
                and {"mamba_selective_scan", EXPORTING} <= names.keys()
            ):
                _swap(stack, module, EXPORTING, lambda: False)
        for (file, owner, name), stand_in in LOOPS.items():
            found: Any = sys.modules.get(f"transformers.models.{file}")
            found = getattr(found, owner, None) if owner else found
            if hasattr(found, name):
                _swap(stack, found, name, stand_in(getattr(found, name)))
        yield


def _swap(stack: contextlib.ExitStack, owner: Any, name: str, stand_in: Any) -> None:
    """Let `owner` have `stand_in` under a name until the stack is unwound."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, stand_in)


def _associative_scan(own: Callable[..., Any]) -> Callable[..., Any]:
    """The associative scan of torch, `own`, but for a linear recurrence."""

    def run(combine: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, **options: Any) -> Any:
        if reverse or not isinstance(xs, Sequence) or len(xs) != 2 or not _is_linear(combine):
            return own(combine, xs, dim, reverse=reverse, **options)
        factors, terms = xs
        return factors.cumprod(dim), torch.ops.hetpeer.linear_scan(factors, terms, dim)

    return run


def _is_linear(combine: Callable[..., Any]) -> bool:
    """Whether two steps (a, b) and (c, d) of h ← a·h + b combine to (a·c, c·b + d), tried with numbers."""
    try:
        return all(
            tuple(combine(first, second)) == (first[0] * second[0], second[0] * first[1] + second[1])
            for first, second in PROBES
        )
    except Exception:  # noqa: BLE001 - a function of the author's may ask for tensors, and raise anything
        return False


def _recurrent_gemma(_own: Callable[..., Any]) -> Callable[..., Any]:
    """RecurrentGemma's `_rnn_scan`: h ← gate·h + x, from the state that it is given, if any."""

    def run(
        _self: Any,
        hidden_states: Tensor,
        recurrent_gate: Tensor,
        reset: Tensor,
        recurrent_states: Tensor | None,
        acc_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        factors, terms = (recurrent_gate * ~reset).type(acc_dtype), hidden_states.type(acc_dtype)
        if recurrent_states is not None:
            first = factors[:, :1] * recurrent_states[:, None] + terms[:, :1]
            terms = torch.cat([first, terms[:, 1:]], dim=1)
        states = torch.ops.hetpeer.linear_scan(factors, terms, 1)
        return states.type(hidden_states.dtype), states[:, -1]

    return run


def _rwkv(own: Callable[..., Any]) -> Callable[..., Any]:
    """RWKV's attention of one whole sequence [batch, steps, channels].

    Numerator and denominator are linear recurrences, scaled by the exponential of a running maximum. The
    result is the same for any scale, so no gradient flows through the maximum.
    """

    def run(
        time_decay: Tensor,
        time_first: Tensor,
        key: Tensor,
        value: Tensor,
        state: Any = None,
        return_state: bool = False,
    ) -> Any:
        if state is not None or return_state:
            return own(time_decay, time_first, key, value, state=state, return_state=return_state)
        decay, key = -torch.exp(time_decay), key.float()
        passed = torch.arange(key.shape[1], device=key.device)[:, None] * decay
        largest = ((key - passed).cummax(dim=1).values + passed).detach()
        before = _later(largest, LOWEST)
        factors, weights = torch.exp(before + decay - largest), torch.exp(key - largest)
        numerators = torch.ops.hetpeer.linear_scan(factors, weights * value, 1)
        denominators = torch.ops.hetpeer.linear_scan(factors, weights, 1)
        # The current step counts with another weight than it has for later ones.
        now = torch.maximum(before, key + time_first).detach()
        old, new = torch.exp(before - now), torch.exp(key + time_first - now)
        numerator = old * _later(numerators, 0.0) + new * value
        return (numerator / (old * _later(denominators, 0.0) + new)).to(value.dtype), None

    return run


def _later(states: Tensor, first: float) -> Tensor:
    """The states of the steps before, and `first` for the first step."""
    return torch.cat([torch.full_like(states[:, :1], first), states[:, :-1]], dim=1)


LOOPS: Mapping[tuple[str, str, str], Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    ("recurrent_gemma.modeling_recurrent_gemma", "RecurrentGemmaRglru", "_rnn_scan"): _recurrent_gemma,
    ("rwkv.modeling_rwkv", "", "rwkv_linear_attention_cpu"): _rwkv,
}
"""(module of transformers, class, function) → its stand-in, made from the library's own."""
