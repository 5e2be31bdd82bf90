"""Data files, a tokenizer and small models as an author of today may have them, made on the spot."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Trained
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

VOCABULARY = 300
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
    "<|end|>{% endfor %}"
)
WORDS = ["the quick brown fox", "jumps over", "the lazy dog and away", "it was never seen again, alas"]
TEXTS = [" ".join(WORDS[: 1 + number % 4]) + f" {number}" for number in range(60)]
CHATS = [
    [
        {"role": "user", "content": f"where is fox {number}?"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "and then?"},
        {"role": "assistant", "content": "no more"},
    ]
    for number, text in enumerate(TEXTS)
]


@cache
def _trained() -> str:
    made = Trained(BPE())
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), Decoder()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|mask|>"]
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    return made.to_str()


def tokenizer_folder(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A folder as `save_pretrained` writes it: byte-level BPE, VOCABULARY ids at most."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Trained.from_str(_trained()),
        pad_token="<|pad|>",
        eos_token="<|end|>",
        mask_token="<|mask|>",
    )
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def jsonl(path: Path, values: Sequence[Any], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": at, field: value}) + "\n" for at, value in enumerate(values)))
    return path


def written(path: Path, values: Sequence[Any], field: str = "text") -> Path:
    """`values` in a file of the format that the suffix says; without a suffix in a folder of `datasets`."""
    ids = range(len(values))
    match path.suffix:
        case ".jsonl":
            return jsonl(path, values, field)
        case ".csv" | ".tsv":
            with path.open("w", newline="") as file:
                rows = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
                rows.writerows([("id", field), *zip(ids, values, strict=True)])
        case ".parquet":
            import pyarrow as pa
            from pyarrow.parquet import write_table

            write_table(pa.table({"id": ids, field: values}), path, row_group_size=25)
        case _:
            from datasets import Dataset, disable_progress_bars

            disable_progress_bars()
            Dataset.from_dict({"id": ids, field: values}).save_to_disk(path)
    return path


CAUSAL = """
from transformers import LlamaConfig, LlamaForCausalLM

def build(vocabulary={vocabulary}):
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128, use_cache=False,
    ))
"""
OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 8), nn.Linear(8, 300)

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), targets.flatten())
"""


def causal_model(folder: Path, vocabulary: int = VOCABULARY) -> str:
    """Reference of a small Llama that is called as transformers' users call it."""
    (folder / "causal.py").write_text(CAUSAL.replace("{vocabulary}", str(vocabulary)))
    return f"{folder / 'causal.py'}:build"


def own_model(folder: Path) -> str:
    """Reference of a module that takes `tokens` and `targets`."""
    (folder / "own.py").write_text(OWN)
    return f"{folder / 'own.py'}:Model"
