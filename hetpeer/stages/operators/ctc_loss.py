"""Connectionist temporal classification (Graves et al., 2006) as one operator, computed on the CPU.

A GPU's kernel adds gradients in no fixed order, and no kernel of torch looks at the values of targets.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 (as everybody writes it)
from torch import Tensor

from hetpeer.stages.operators.operator_family import Operator, is_abstract

CTC_LOSS = "hetpeer.ctc_loss"
MAX_CELLS = 1 << 27
"""Numbers that one call may keep: frames times states of the targets, for each sample."""


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Loss of each sample, float32 [samples].

    `log_probs` [frames, samples, classes] float32, `targets` [samples, most] int64 padded at the end, lengths
    [samples] int64. A sample whose frames are too few has an infinite loss, or with `zero_infinity` 0.
    Raises ValueError for other shapes or dtypes, IndexError for lengths and targets out of range.
    """
    frames, samples, classes = log_probs.shape
    lengths = (input_lengths, target_lengths)
    if targets.dim() != 2 or any(one.shape != (samples,) for one in (targets[:, 0], *lengths)):
        raise ValueError("a CTC loss takes [frames, samples, classes], [samples, most] and two [samples]")
    if log_probs.dtype != torch.float32 or any(one.dtype != torch.int64 for one in (targets, *lengths)):
        raise ValueError("a CTC loss takes float32 and int64")
    if type(blank) is not int or not 0 <= blank < classes or type(zero_infinity) is not bool:
        raise ValueError("a CTC loss takes the class of blanks, and whether infinity is 0")
    most = targets.shape[1]
    if frames * samples * (2 * most + 1) > MAX_CELLS:
        raise ValueError(f"a CTC loss of {samples} samples keeps at most {MAX_CELLS} numbers")
    if is_abstract(log_probs):
        return log_probs.sum((0, 2))
    heard, spoken = input_lengths.detach().cpu(), target_lengths.detach().cpu()
    _check(heard, frames)
    _check(spoken, most)
    used = torch.arange(most) < spoken[:, None]
    padded = targets.detach().cpu().where(used, 0)
    _check(padded, classes - 1)
    found = F.ctc_loss(
        log_probs.cpu(), padded, heard, spoken, blank, reduction="none", zero_infinity=zero_infinity
    )
    return found.to(log_probs.device)


def _check(numbers: Tensor, most: int) -> None:
    if numbers.numel():
        low, high = (int(end) for end in torch.aminmax(numbers))
        if low < 0 or high > most:
            raise IndexError(f"{low if low < 0 else high} is not between 0 and {most}")


FAMILY: Mapping[str, Operator] = {CTC_LOSS: Operator(ctc_loss)}
