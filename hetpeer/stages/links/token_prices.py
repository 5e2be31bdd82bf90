"""Price of compression in tokens: how many more a model needs for the same held-out loss. Pure.

Measured on a GPT in four stages (`benchmarks/loss_prices.py`, benchmarks/results/loss-prices-128.json; 1,000
steps, one seed), for the encodings that `adaptive_ratio.py` chooses under `topk-int4`. Rounding to bytes is
free: its loss differed by less than its error (benchmarks/results/adaptive-gpt.json). A border's price is the
third root of that of the three borders, as if they multiplied.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final

PRICES: Final[tuple[tuple[float, float], ...]] = (
    (1.0, 1.0),
    (3.9, 1.0),
    (7.5, 1.17),
    (25.0, 2.23),
    (100.0, 5.0),
)
"""(ratio, tokens of three borders compared with no codec); the ratios rise."""
BORDERS: Final = 3
"""Borders of the measured model."""


def log_price(ratio: float) -> float:
    """Logarithm of one border's price at `ratio`, both ways: linear in log ratio between measurements.

    Beyond the last it goes on as between the last two. 0 below the first.

    math.exp(log_price(25.0))  # the part more tokens for one border at 25
    """
    if ratio <= PRICES[0][0]:
        return 0.0
    at = min(max(bisect_right(PRICES, (ratio, math.inf)), 1), len(PRICES) - 1)
    (low, first), (high, last) = PRICES[at - 1], PRICES[at]
    way = math.log(ratio / low) / math.log(high / low)
    return (math.log(first) + way * math.log(last / first)) / BORDERS
