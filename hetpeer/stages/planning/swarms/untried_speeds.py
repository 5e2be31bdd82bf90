"""Speeds of machines that have only multiplied matrices, beside those that have tried blocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def on_blocks(reached: Sequence[float], products: Sequence[float]) -> list[float]:
    """FLOP/s that each machine reaches on blocks, in order.

    `reached`: FLOP/s on blocks, in training or rehearsal; that of matrix products if it has tried nothing
    else yet; 0 if unknown. `products`: FLOP/s in matrix products; 0 if not reported. Who has tried nothing
    else counts as fast as its products times the median ratio of the others. Products are faster than blocks,
    so it would seem faster than all that have tried.

    >>> on_blocks([3e9, 20e9, 0.0], [10e9, 20e9, 0.0])
    [3000000000.0, 6000000000.0, 0.0]
    """
    pairs = list(zip(reached, products, strict=True))
    ratios = [flops / product for flops, product in pairs if product and flops not in (0.0, product)]
    ratio = median(ratios) if ratios else 1.0
    return [flops * ratio if flops == product else flops for flops, product in pairs]
