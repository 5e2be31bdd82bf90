"""The registry of value codecs: a new codec is one module and one line here (docs/extending.md)."""

from __future__ import annotations

from hetpeer.stages.links.half_values import BF16, FP16
from hetpeer.stages.links.quantized_values import INT4, INT8
from hetpeer.stages.links.sparse_movement import TopK2
from hetpeer.stages.links.value_codec import ValueCodec

VALUE_CODECS: dict[str, ValueCodec] = {
    "bf16": BF16(),
    "fp16": FP16(),
    "int8": INT8(),
    "int4": INT4(),
    "topk2": TopK2(),
}
"""Name in manifests and frames → codec; codec.py has the names of `topk-` codecs."""
