"""Models of the transformers library, small and with random weights: what a run's author may already have.

Needs `pip install 'hetpeer[examples]'` on the author's machine; volunteers need nothing of it.
"""

from typing import Any

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


class LanguageModel(nn.Module):
    """Tokens and targets [B, T] in, the mean loss out; logits without targets.

    Caches are off: each call is one pass.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt2(layers: int = 4, width: int = 128) -> LanguageModel:
    """GPT-2: learned positions, tied head, dropout 0.1."""
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=width, n_layer=layers, n_head=4)
    return LanguageModel(GPT2LMHeadModel(config))


def llama(layers: int = 4, width: int = 128) -> LanguageModel:
    """Llama: rotary positions, RMSNorm, grouped-query attention, gated MLP."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LanguageModel(LlamaForCausalLM(config))
