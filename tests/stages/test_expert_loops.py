"""Experts of transformers that loop over experts by values: loss and gradients are the eager model's."""

import pytest
import torch

from hetpeer.bootstrap.authoring.user_code import with_loss
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.amounts import mostly_proof
from tests.stages.split_run import assert_same_step, eager_step, split_step

pytestmark = pytest.mark.xdist_group("models")

USUAL = {"vocab_size": 64, "max_position_embeddings": 16, "use_cache": False}
LAYERS = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
SWITCH = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
SWITCH |= {"num_experts": 4, "dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0}
NLLB = {f"{side}_{part}": size for side in ("encoder", "decoder") for part, size in [("layers", 2)]}
NLLB |= {f"{side}_{part}": 4 for side in ("encoder", "decoder") for part in ("attention_heads", "ffn_dim")}
NLLB |= {f"{side}_{part}": 0.0 for side in ("encoder", "decoder") for part in ("layerdrop",)}
NLLB |= {f"{side}_sparse_step": 2 for side in ("encoder", "decoder")}
NLLB |= {"d_model": 16, "num_experts": 4, "moe_token_dropout": 0.0}
MODELS = {
    "mixtral, eager": (
        "AutoModelForCausalLM",
        "mixtral",
        {**LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "jetmoe": (
        "AutoModelForCausalLM",
        "jetmoe",
        {**LAYERS, "num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4},
    ),
    "longcat_flash": (
        "AutoModelForCausalLM",
        "longcat_flash",
        {
            "num_layers": 1,
            "hidden_size": 16,
            "ffn_hidden_size": 16,
            "expert_ffn_hidden_size": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 4,
            "head_dim": 4,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "switch_transformers": ("AutoModelForSeq2SeqLM", "switch_transformers", SWITCH),
    "nllb-moe": ("AutoModelForSeq2SeqLM", "nllb-moe", NLLB),
}


@pytest.mark.parametrize("name", mostly_proof(MODELS, here={"mixtral, eager", "jetmoe"}))
def test_experts_in_a_loop_are_the_eager_ones(name):
    import transformers

    kind, architecture, settings = MODELS[name]
    torch.manual_seed(4)
    config = transformers.CONFIG_MAPPING[architecture](**USUAL, **settings)
    model = getattr(transformers, kind).from_config(config, experts_implementation="eager")
    batches = []
    for samples in (4, 3):
        tokens = torch.randint(3, 64, (samples, 8))
        batches.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens})
    model = with_loss(model, None, batches[0])
    dag = trace(model, batches[0])
    assert dag.dynamic
    specs = cut_blocks(dag, 2)
    split = split_step(specs, [(0, 1), (1, len(specs))], dag.tensors, batches)
    assert_same_step(split, eager_step(model, batches), 1e-5)
