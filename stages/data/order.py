"""Which sequences a microbatch consists of: a pure function of the run's seed, so anybody may compute it again.

Philox4x64-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011) is counter-based: the key is
(seed, stream), the counter (step, microbatch). Only its raw 64-bit output is used, which numpy keeps stable across
versions and platforms (NEP 19), unlike the distributions of `Generator`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Stream = Literal["train", "evaluation"]
KEYS: dict[Stream, int] = {"train": 1, "evaluation": 2}


def sample_offsets(
    seed: int, stream: Stream, step: int, microbatch: int, count: int, population: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """`count` token offsets in [0, population) where the sequences of one microbatch begin, drawn with replacement.

    Evaluation microbatches are the same at every step. The bias of the modulo is below population / 2**64.
    """
    counter = [0, step if stream == "train" else 0, microbatch, 0]
    raw = np.random.Philox(key=[seed, KEYS[stream]], counter=counter).random_raw(count)
    return (raw % np.uint64(population)).astype(np.int64)
