"""Philox4x64-10 in integer tensor operations, for devices without numpy, with numpy's bits.

Words are unsigned 64-bit numbers in int64 tensors; products wrap around, and the high half of a product is
put together from 32-bit halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetpeer.stages.operators.random_draws import DROPOUT_STREAM, Draw, threshold

ROUNDS = 10
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
WORD, HALF = (1 << 64) - 1, (1 << 32) - 1


def keep_mask(draw: Draw, operator: int, probability: float, count: int, device: torch.device) -> Tensor:
    """The same draws as `random_draws.keep_mask`, as a bool tensor [count] on `device`."""
    blocks = -(-count // 16)
    words = torch.stack(_philox((draw.seed, DROPOUT_STREAM), draw.counter(operator), blocks, device), dim=1)
    shifts = torch.tensor([0, 16, 32, 48], device=device)
    bits = (words.unsqueeze(-1) >> shifts) & 0xFFFF
    return bits.view(-1)[:count] >= threshold(probability)


def _philox(
    key: tuple[int, int], counter: tuple[int, int, int, int], blocks: int, device: torch.device
) -> list[Tensor]:
    """The four words of `blocks` blocks. As in numpy, the first block's counter is one above `counter`."""
    low = torch.arange(1, blocks + 1, dtype=torch.int64, device=device) + counter[0]
    x = [low, *(torch.full_like(low, _signed(word)) for word in counter[1:])]
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(x[0], MULTIPLIERS[0])
        high1, low1 = _multiply(x[2], MULTIPLIERS[1])
        x = [high1 ^ x[1] ^ _signed(k0), low1, high0 ^ x[3] ^ _signed(k1), low0]
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return x


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 128-bit product."""
    a0, a1 = a & HALF, (a >> 32) & HALF
    b0, b1 = b & HALF, b >> 32
    low, cross0, cross1 = a0 * _signed(b0), a0 * _signed(b1), a1 * _signed(b0)
    middle = ((low >> 32) & HALF) + (cross0 & HALF) + (cross1 & HALF)
    high = a1 * _signed(b1) + ((cross0 >> 32) & HALF) + ((cross1 >> 32) & HALF) + (middle >> 32)
    return high, a * _signed(b)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - (1 << 64) if word >> 63 else word
