"""Small models of transformers and their samples: plain, padded with a mask, packed with positions."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hetpeer.bootstrap.samples.packing import IDS, LABELS, Piece, packed, padded

LENGTH, VOCABULARY, LAYERS = 16, 64, 4


class Loss(nn.Module):
    """A model of transformers as a function of its arrays that returns the loss alone."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        arrays = {"attention_mask": attention_mask, "position_ids": position_ids}
        given = {name: array for name, array in arrays.items() if array is not None}
        return self.model(input_ids=input_ids, labels=labels, **given, **self.options).loss  # type: ignore[no-any-return]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return Loss(LlamaForCausalLM(config), use_cache=False)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=LAYERS, n_head=4)
    return Loss(GPT2LMHeadModel(config), use_cache=False)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    return Loss(BertForMaskedLM(config))


MODELS: Mapping[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "bert": bert}


def documents(count: int) -> list[Piece]:
    """Documents of 3 to 16 tokens, from a fixed seed."""
    random = np.random.default_rng(5)
    ids = [random.integers(1, VOCABULARY, random.integers(3, LENGTH + 1)) for _ in range(count)]
    return [Piece(one, np.concatenate(([-100], one[1:]))) for one in ids]


def samples(kind: str, count: int) -> dict[str, Tensor]:
    """A microbatch of `count` samples: "plain", "padded" or "packed"."""
    maker = packed if kind == "packed" else padded
    made: Sequence[Mapping[str, Any]] = list(islice(maker(documents(4 * count), LENGTH, 0), count))
    names = (IDS, LABELS) if kind == "plain" else tuple(made[0])
    return {name: torch.from_numpy(np.stack([one[name] for one in made])) for name in names}
