"""CTC losses, which torch.export cannot trace, as our own operator (operators/ctc_loss.py)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody writes it)
from torch import Tensor

from hetpeer.stages.operators.ctc_loss import ctc_loss


@torch.library.custom_op("hetpeer::ctc_loss", mutates_args=())
def _losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)


@_losses.register_fake
def _shape_of_losses(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@contextlib.contextmanager
def ctc_as_operator() -> Iterator[None]:
    """Let `F.ctc_loss` of padded targets, and transformers' loss, be our operator."""
    own = F.ctc_loss
    mapping = getattr(sys.modules.get("transformers.loss.loss_utils"), "LOSS_MAPPING", {})
    of_library = mapping.get("ForCTC")
    F.ctc_loss = _padded(own)
    if of_library is not None:
        mapping["ForCTC"] = _of_transformers
    try:
        yield
    finally:
        F.ctc_loss = own
        if of_library is not None:
            mapping["ForCTC"] = of_library


def _padded(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch's function `own`, but for padded targets and lengths that are tensors."""

    def run(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        lengths = (input_lengths, target_lengths)
        batched = targets.dim() == 2 and log_probs.dim() == 3
        if not batched or not all(isinstance(one, Tensor) for one in lengths):
            return own(log_probs, targets, *lengths, blank, reduction, zero_infinity)
        whole = [one.long() for one in (targets, *lengths)]
        losses: Tensor = torch.ops.hetpeer.ctc_loss(log_probs.float(), *whole, blank, zero_infinity)
        if reduction == "none":
            return losses
        return losses.sum() if reduction == "sum" else (losses / whole[2].clamp(min=1)).mean()

    return run


def _of_transformers(
    logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    blank_token_id: int,
    reduction: str = "mean",
    zero_infinity: bool = False,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    """Transformers' loss, whose targets have no padding: here they are moved to the front of each row."""
    counts = (labels != ignore_index) & (labels != blank_token_id)
    order = torch.argsort((~counts).long(), dim=1, stable=True)
    targets = labels.gather(1, order)
    log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
    return F.ctc_loss(
        log_probs, targets, logit_lengths, counts.sum(-1), blank_token_id, reduction, zero_infinity
    )
