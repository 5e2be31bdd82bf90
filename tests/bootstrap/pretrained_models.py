"""Folders of small random models of transformers, as `save_pretrained` leaves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as t

from tests.bootstrap.written_data import MARKED, VOCABULARY, tokenizer_folder

LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
VIT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}


def llama(folder: Path, dtype: torch.dtype = torch.float32, *, tokenizer: bool = True, **own: Any) -> Path:
    """A causal model with a tokenizer whose template marks the assistant's words; its heads are tied."""
    sizes = LLAMA | {"tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0} | own
    config = t.LlamaConfig(**sizes)
    return saved(lambda: t.LlamaForCausalLM(config), folder, dtype, tokenizer=tokenizer)


def bert(folder: Path) -> Path:
    """A masked language model."""
    return saved(lambda: t.BertForMaskedLM(t.BertConfig(**BERT)), folder)


def t5(folder: Path) -> Path:
    """An encoder-decoder."""
    return saved(lambda: t.T5ForConditionalGeneration(t.T5Config(**T5)), folder)


def vit(folder: Path) -> Path:
    """A classifier of images with three classes."""
    return saved(lambda: t.ViTForImageClassification(t.ViTConfig(**VIT)), folder, tokenizer=False)


def saved(
    build: Callable[[], Any], folder: Path, dtype: torch.dtype = torch.float32, *, tokenizer: bool = True
) -> Path:
    """The model of `build` with weights of its own, written to `folder`."""
    torch.manual_seed(5)
    build().to(dtype).save_pretrained(folder)
    if tokenizer:
        tokenizer_folder(folder, MARKED)
    return folder


SAMPLES = """
import numpy as np

def ids(draw):
    return draw.integers(5, 250, 16)

def samples():
    for number in range(60):
        draw = np.random.default_rng(number)
        mask = np.ones(16, dtype=np.int64)
        yield {arrays}
"""
ARRAYS = {
    "seq2seq": '{"input_ids": ids(draw), "attention_mask": mask, "labels": ids(draw)}',
    "sequence-classification": (
        '{"input_ids": ids(draw), "attention_mask": mask, "labels": np.array(number % 3)}'
    ),
    "token-classification": '{"input_ids": ids(draw), "attention_mask": mask, "labels": ids(draw) % 3}',
    "image-classification": (
        '{"pixel_values": draw.normal(size=(3, 8, 8)).astype(np.float32), "labels": np.array(number % 3)}'
    ),
}
"""Task → a sample of its arrays."""


def samples_for(task: str, folder: Path) -> str:
    """Reference of a function that yields samples for a task."""
    (folder / "samples.py").write_text(SAMPLES.replace("{arrays}", ARRAYS[task]))
    return f"{folder / 'samples.py'}:samples"
