"""Options of `hetpeer init` that are one of a few words."""

from __future__ import annotations

import enum


class Shape(enum.StrEnum):
    """Shape of the learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class OnBadSample(enum.StrEnum):
    """Consequence of a sample that cannot be computed (docs/trust.md)."""

    HALT = "halt"
    SKIP = "skip"


class FrozenDtype(enum.StrEnum):
    """Form in which frozen parameters are sent and kept (docs/graph.md)."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


class Mode(enum.StrEnum):
    """Way in which pipelines agree on parameters (docs/training.md)."""

    EXACT = "exact"
    GROUPED = "grouped"
