"""Forms of an export."""

from __future__ import annotations

import enum


class Format(enum.StrEnum):
    """Form of an export."""

    HF = "hf"
    """A folder that `from_pretrained` of transformers loads."""
    ADAPTER = "adapter"
    """A folder that peft loads beside the frozen model: the adapters alone."""
    SAFETENSORS = "safetensors"
    """One file of tensors."""


class Dtype(enum.StrEnum):
    """Number format of exported weights."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def torch_name(self) -> str:
        return {Dtype.BF16: "bfloat16", Dtype.FP16: "float16"}.get(self, "float32")
