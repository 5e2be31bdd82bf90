"""Weights of samples: how much each counts in the mean loss of its step (docs/data.md, "Weights").

A run whose samples count alike has no weights: each microbatch then counts by its samples. Otherwise there is
one file of float32 numbers, little-endian, one for each sample in the order of the shards: training samples
first, then held-out ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from hetpeer.stages.data.shards import write_durably

Weights = np.ndarray[tuple[int], np.dtype[np.float32]]

NUMBER = np.dtype("<f4")


def write_weights(folder: Path, weights: Weights) -> dict[str, Any]:
    """Write the file of `weights` durably into `folder`; returns its name, hash and size. Raises OSError."""
    data = weights.astype(NUMBER).tobytes()
    digest = blake3(data).hexdigest()
    name = f"{digest[:32]}.weights"
    write_durably(folder / name, data)
    return {"name": name, "blake3": digest, "bytes": len(data)}


def read_weights(path: Path) -> Weights:
    """The weights in a file whose hash was checked. Raises OSError, and ValueError if one is no weight."""
    weights = np.frombuffer(path.read_bytes(), dtype=NUMBER).astype(np.float32)
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError("a weight is negative or not finite")
    return weights


def share(weights: Sequence[float], number: int) -> float:
    """Share of microbatch `number` in its step, whose training microbatches have these `weights`.

    The same bits on every machine: math.fsum rounds once. 0 if nothing weighs anything.
    """
    total = math.fsum(weights)
    return weights[number] / total if total else 0.0
