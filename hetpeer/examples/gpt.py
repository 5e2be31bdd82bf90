"""A decoder-only transformer language model in plain torch; nothing here knows hetpeer.

Names and shapes are GPT-2's (https://github.com/openai/gpt-2). Without arguments there is no dropout and the
head is not tied to the embedding; `build_tied` is GPT-2's own way. Shape suffixes: B batch, T tokens, D
width, H heads, K width of a head, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = (
            part_BTD.view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for part_BTD in self.c_attn(x_BTD).split(D, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)
        return self.c_proj(y_BHTK.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x_BTD), approximate="tanh"))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.drop(self.attn(self.ln_1(x_BTD)))
        return x_BTD + self.drop(self.mlp(self.ln_2(x_BTD)))


class GPT(nn.Module):
    """Tokens in; the mean cross entropy of the targets (a float32 scalar) out, or logits without targets."""

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        context: int,
        vocabulary: int,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.drop = nn.Dropout(dropout)
        if tied:
            self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                # GPT-2 scales the layers that write to the residual stream by its depth.
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if "c_proj" in name else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        T = tokens.shape[1]
        x_BTD = self.drop(self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device)))
        for layer in self.h:
            x_BTD = layer(x_BTD)
        logits_BTV = self.lm_head(self.ln_f(x_BTD))
        if targets is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten())


def build(width: int = 128, layers: int = 4, heads: int = 4, context: int = 64, vocabulary: int = 256) -> GPT:
    """The model with fresh parameters; seed torch before for the same ones every time."""
    return GPT(width, layers, heads, context, vocabulary)


def build_tied() -> GPT:
    """The head shares the embedding's table, and there is dropout, as in GPT-2."""
    return GPT(width=128, layers=4, heads=4, context=64, vocabulary=256, dropout=0.1, tied=True)


def build_1b3() -> GPT:
    """GPT-3 XL's sizes: 24 layers, 1.3 billion parameters."""
    return GPT(width=2048, layers=24, heads=16, context=2048, vocabulary=50257, tied=True)


def build_7b() -> GPT:
    """32 layers, 6.9 billion parameters."""
    return GPT(width=4096, layers=32, heads=32, context=2048, vocabulary=50257)
