"""Layers of experts in transformers that loop over the experts, traced without a choice by values.

How many tokens an expert gets depends on values, so torch.export cannot trace such a loop. Where tokens are
few for each expert they are sorted and multiplied in groups; the experts of Switch and NLLB-MoE, which are
modules of their own, compute all tokens. `init` compares the result with the library's own on the first
microbatch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot


@contextlib.contextmanager
def loops_as_groups() -> Iterator[None]:
    """Let the libraries' loops over experts be the functions of this module."""
    with contextlib.ExitStack() as stack:
        for (file, owner, name), stand_in in LOOPS.items():
            found: Any = getattr(sys.modules.get(f"transformers.{file}"), owner, None)
            if found is not None:
                stack.callback(setattr, found, name, getattr(found, name))
                setattr(found, name, stand_in)
        yield


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows [rows, in] times their expert's matrix in `weights` [experts, out, in]; `ends` [experts]."""
    result: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weights.transpose(-2, -1), ends)
    return result


def _interface(self: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' choice among implementations of experts: grouped products instead of the eager loop."""
    name = "grouped_mm" if implementation in (None, "eager") else implementation
    found: Callable[..., Any] = self.get(name, default)
    return found


def _jetmoe_gating(self: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """JetMoE's choice of experts; the numbers of tokens stay a tensor."""
    logits = self.layer(hidden_states).float()
    best, chosen = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(best, dim=1).type_as(hidden_states).flatten()
    _, order = chosen.flatten().sort(0)
    counts = one_hot(chosen.flatten(), self.num_experts).sum(0)
    return order, order.div(self.top_k, rounding_mode="trunc"), gates[order], counts, logits


def _jetmoe_experts(self: Any, inputs: Tensor, expert_size: Tensor) -> Tensor:
    """JetMoE's experts on sorted tokens; `expert_size`: tokens of each."""
    return _grouped(inputs, self.weight, expert_size.cumsum(0))


def _longcat_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """LongCat's experts on tokens [tokens, width]; those after the last routed one change nothing."""
    routed = 0 if self.gate_up_proj is None else self.num_routed_experts
    expert, order = top_k_index.flatten().sort(0)
    token = order.div(top_k_index.shape[1], rounding_mode="trunc")
    rows = done = hidden_states[token]
    if routed:
        ends = one_hot(expert, self.total_experts).sum(0).cumsum(0)[:routed]
        gate, up = _grouped(rows, self.gate_up_proj[:routed], ends).chunk(2, dim=-1)
        done = _grouped(self.act_fn(gate) * up, self.down_proj, ends)
        done = torch.where((expert >= routed)[:, None], rows, done)
    done = done * top_k_weights.flatten()[order][:, None]
    return torch.zeros_like(hidden_states).index_add(0, token, done.to(hidden_states.dtype))


def _switch_experts(self: Any, hidden_states: Tensor, selected: Tensor, weights: Tensor) -> Tensor:
    """Switch's experts: `selected` [tokens, 1, experts] of 0 and 1, `weights` [tokens, 1]."""
    return _weighted(self.values(), hidden_states, selected[:, 0] * weights)


def _nllb_experts(self: Any, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
    """NLLB-MoE's experts: the mask's values [tokens, experts], 0 and 1, name them."""
    shares = [((router_mask == number) * router_probs).sum(-1) for number in (0, 1)]
    done = _weighted(list(self.values())[:2], hidden_states, torch.stack(shares, dim=-1))
    return self.token_dropout(done)  # type: ignore[no-any-return]


def _weighted(experts: Any, hidden_states: Tensor, shares: Tensor) -> Tensor:
    """Sum of the experts' results for all tokens, times `shares` [tokens, experts]."""
    parts = [expert(hidden_states) * shares[:, place, None] for place, expert in enumerate(experts)]
    return torch.stack(parts).sum(0).to(hidden_states.dtype)


LOOPS: Mapping[tuple[str, str, str], Callable[..., Any]] = {
    ("integrations.moe", "ExpertsInterface", "get_interface"): _interface,
    ("models.jetmoe.modeling_jetmoe", "JetMoeTopKGating", "forward"): _jetmoe_gating,
    ("models.jetmoe.modeling_jetmoe", "JetMoeParallelExperts", "forward"): _jetmoe_experts,
    ("models.longcat_flash.modeling_longcat_flash", "LongcatFlashExperts", "forward"): _longcat_experts,
    (
        "models.switch_transformers.modeling_switch_transformers",
        "SwitchTransformersExperts",
        "forward",
    ): _switch_experts,
    ("models.nllb_moe.modeling_nllb_moe", "NllbMoeExperts", "forward"): _nllb_experts,
}
"""(module of transformers, class, method) → what stands for it while a model is traced."""
