"""Architectures of `make zoo` by family, and the settings that make each small.

A name is a model type of transformers; what follows a colon is the task (default: that of the family).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES: Mapping[str, tuple[str, str]] = {
    "decoders": (
        "causal",
        """
        llama gpt2 gpt_neo gpt_neox gptj gpt_bigcode codegen opt bloom mpt falcon phi phi3 qwen2 qwen3 gemma
        gemma2 gemma3_text mistral ministral cohere cohere2 olmo olmo2 olmo3 stablelm starcoder2 persimmon
        nemotron glm glm4 granite helium smollm3 exaone4 arcee seed_oss apertus biogpt xglm ctrl openai-gpt
        diffllama doge bitnet ernie4_5 hunyuan_v1_dense vaultgemma youtu lfm2 jais2 minicpm3 cwm
        gpt_neox_japanese
        """,
    ),
    "state-space and hybrids": (
        "causal",
        """
        mamba mamba2 falcon_mamba bamba falcon_h1 recurrent_gemma rwkv xlstm zamba zamba2 nemotron_h
        qwen3_next qwen3_5_text olmo_hybrid kimi_linear
        """,
    ),
    "mixtures of experts": (
        "causal",
        """
        mixtral qwen2_moe qwen3_moe olmoe gpt_oss granitemoe granitemoeshared granitemoehybrid minimax
        flex_olmo jamba jetmoe phimoe deepseek_v2 deepseek_v3 glm4_moe ernie4_5_moe dots1
        hunyuan_v1_moe lfm2_moe afmoe longcat_flash minimax_m2 exaone_moe llama4_text
        """,
    ),
    "encoders": (
        "masked",
        """
        bert roberta albert electra distilbert deberta deberta-v2 mpnet modernbert camembert xlm-roberta
        xlm-roberta-xl convbert squeezebert mobilebert megatron-bert rembert roformer big_bird longformer
        ibert fnet funnel nystromformer mra yoso esm ernie layoutlm luke flaubert xlm eurobert xmod
        roberta-prelayernorm data2vec-text
        """,
    ),
    "encoder-decoders": (
        "seq2seq",
        """
        t5 mt5 umt5 longt5 switch_transformers bart mbart pegasus pegasus_x marian blenderbot
        blenderbot-small m2m_100 nllb-moe led plbart mvp prophetnet fsmt bigbird_pegasus t5gemma
        """,
    ),
    "vision": (
        "image",
        """
        vit deit beit data2vec-vision dinov2 dinov2_with_registers resnet regnet convnext convnextv2 swin
        swinv2 cvt focalnet segformer pvt pvt_v2 poolformer mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2
        efficientnet siglip bit hiera levit swiftformer vit_msn ijepa vit_mae:pretraining
        videomae:pretraining hgnet_v2 textnet
        """,
    ),
    "audio, series, several senses": (
        "audio",
        """
        audio-spectrogram-transformer wav2vec2:ctc hubert:ctc wavlm:ctc wav2vec2-conformer:ctc sew:ctc
        whisper:speech speech_to_text:speech moonshine:raw-speech clip:contrast siglip:contrast
        patchtst:series patchtsmixer:series llava:image-text
        """,
    ),
    "heads and adapters": (
        "sequence",
        "bert roberta:tokens distilbert:answers llama:lora llama:dora gpt2",
    ),
}
"""Family → its usual task, and its architectures."""

SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "hidden_dim": 64,
    "n_inner": 64,
    "d_ff": 64,
    "dff": 64,
    "d_kv": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "head_dim": 8,
    "attention_head_size": 8,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "image_size": 32,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_codebooks": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 8,
    "attention_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "lru_width": 32,
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_d_ssm": 64,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
"""Setting → its small value, where a configuration has the setting as a number."""

_LATENT = {"num_key_value_heads": 4}
_ROTARY = {"rotary_dim": 4}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
    },
    "deepseek_v3": _LATENT,
    "longcat_flash": _LATENT,
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "gptj": _ROTARY,
    "codegen": _ROTARY,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "falcon": {"head_dim": ...},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "mamba2": {"num_heads": 8},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "head_dim": ...,
        "use_mamba_kernels": False,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "head_dim": ...},
    "xlstm": {"v_head_dim": ...},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 8},
    "switch_transformers": {"dropout_rate": 0.0, "router_jitter_noise": 0.0, "num_sparse_encoder_layers": 1},
    "nllb-moe": {"moe_token_dropout": 0.0, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "deit": {"architectures": ["DeiTForImageClassification"]},
    "levit": {"architectures": ["LevitForImageClassification"]},
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1]},
    "convnextv2": {"hidden_sizes": [16, 32], "depths": [1, 1]},
    "swin": {"window_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4]},
    "mobilevitv2": {"image_size": 64},
    "efficientnet": {"hidden_dim": 2560},
    "funnel": {"num_hidden_layers": ..., "block_sizes": [1, 1], "d_head": 8},
    "mobilebert": {"embedding_size": 16},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 2},
    "xmod": {"default_language": "en_XX"},
    "prophetnet": {"num_hidden_layers": ...},
    "moonshine": {"pad_token_id": 0},
    "wav2vec2-conformer": {"vocab_size": 128},
    "llava": {"image_token_id": 127},
    "gpt2:sequence": {"pad_token_id": 0},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
}
"""Architecture → settings of its own; `...` leaves one out that the configuration computes."""
