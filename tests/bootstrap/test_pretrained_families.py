"""Models of many families make the way from a folder through load and export to `from_pretrained` unchanged.

Nothing is traced or trained here: names, ties, fused experts and buffers are what differs between families.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t

from hetpeer.bootstrap.pretrained import load
from hetpeer.bootstrap.pretrained.card import ModelCard
from hetpeer.bootstrap.pretrained.formats import Dtype
from hetpeer.bootstrap.pretrained.kept import KeptFiles
from hetpeer.bootstrap.pretrained.source import ModelSource
from hetpeer.bootstrap.pretrained.tasks import AUTO_CLASSES, Task
from hetpeer.bootstrap.pretrained.written import write_model
from tests.bootstrap.pretrained_models import BERT, LLAMA, T5, VIT

EXPERTS = LLAMA | {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
BART = {
    "vocab_size": 300,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    ),
    "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**LLAMA, head_dim=8, tie_word_embeddings=True)),
    "gemma": lambda: t.GemmaForCausalLM(t.GemmaConfig(**LLAMA, head_dim=8)),
    "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**EXPERTS)),
    "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**EXPERTS, moe_intermediate_size=16)),
    "bert": lambda: t.BertForMaskedLM(t.BertConfig(**BERT)),
    "roberta": lambda: t.RobertaForTokenClassification(t.RobertaConfig(**BERT, num_labels=3)),
    "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**T5)),
    "bart": lambda: t.BartForConditionalGeneration(t.BartConfig(**BART)),
    "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**VIT)),
    "resnet": lambda: t.ResNetForImageClassification(
        t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    ),
}
CARD = ModelCard(
    name="run",
    run_id="0",
    base="",
    on_hub=False,
    task=Task.CAUSAL_LM,
    version=0,
    steps=0,
    loss=None,
    evaluation=None,
    accuracy=None,
    samples=0,
    shards=[],
    data="",
    credit={},
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_comes_home_as_it_was(family: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    FAMILIES[family]().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    source = ModelSource.parse(f"hf:{tmp_path / 'model'}")
    said: list[str] = []
    model, task = load.load(source, None, None, 0, said.append)
    assert said == ["the checkpoint is stored as bfloat16; it is trained as float32"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert load.pretrained_part(model) == ("", model)

    kept = KeptFiles(tmp_path / "kept")
    kept.keep_model(model, source)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for tensor in weights.values():
        if tensor.is_floating_point():
            tensor.add_(0.25)  # as if trained
    (tmp_path / "out").mkdir()
    assert write_model(tmp_path / "out", kept, weights, Dtype.FLOAT32, CARD) == ()

    kind = getattr(t, AUTO_CLASSES[task])
    loaded, found = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found.values()), found
    assert type(loaded) is kind.from_pretrained(tmp_path / "model").__class__
    again = loaded.state_dict()
    assert again.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(again[name], tensor), name
