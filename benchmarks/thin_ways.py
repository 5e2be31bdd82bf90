"""Ways to send few numbers of a token between the stages of a GPT, in one process as in a swarm.

Each way changes what leaves a stage; `Wire` rounds it as a link would, and its gradient on the way back, and
counts the bytes. `bottleneck` is what `hetpeer init --bottleneck` makes. The others were tried and not built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetpeer.bootstrap.authoring.bottlenecks import insert
from hetpeer.bootstrap.run.run_directory import Bottlenecks, LayerBottleneck
from hetpeer.examples.gpt import GPT
from hetpeer.stages.links.value_codecs import VALUE_CODECS
from hetpeer.stages.operators.names import BOTTLENECK

FLOAT_BYTES = 4
EVERY, FORGETS = 20, 0.8
"""Steps between two bases of the tracked subspace, and what is left of earlier covariances in each step."""


class Wire:
    """A link: tensors as they are at its other end, and the bytes that they took."""

    def __init__(self, codec: str) -> None:
        self.codec = codec
        self.nbytes = 0
        self.open = True
        """False in an evaluation, which travels as it is."""

    def __call__(self, x: Tensor) -> Tensor:
        sent: Tensor = _Sent.apply(x, self) if self.open else x
        return sent

    def carry(self, x: Tensor) -> Tensor:
        """`x` written and read."""
        flat = x.detach().reshape(-1).contiguous()
        if self.codec == "none":
            self.nbytes += FLOAT_BYTES * flat.numel()
            return x.detach().clone()
        codec = VALUE_CODECS[self.codec]
        written = memoryview(bytearray(codec.nbytes(flat.numel())))
        codec.encode(flat, written)
        self.nbytes += len(written)
        return codec.decode(written, flat.numel()).reshape(x.shape).clone()


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return wire.carry(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.wire.carry(gradient), None


def as_it_is(model: GPT, ends: list[int], wire: Wire) -> nn.Module:
    """All features cross."""
    for end in ends:
        model.h[end].register_forward_hook(lambda _layer, _args, x: wire(x))
    return model


def bottleneck(
    model: GPT,
    ends: list[int],
    wire: Wire,
    rank: int,
    seed: int,
    *,
    tokens: bool = True,
    narrow: bool = True,
) -> nn.Module:
    """The product's; without `tokens` no token's vector is added behind a border.

    Without `narrow` all features cross, and the tokens' vectors alone are left of a bottleneck: what they are
    worth by themselves, as they are more parameters.
    """
    width = model.wte.embedding_dim
    places = [LayerBottleneck(layer=f"h.{end}", dim=-1, width=width, tokens=tokens) for end in ends]
    insert(model, Bottlenecks(rank=rank, embedding="wte" if tokens else "", places=tuple(places)), seed)
    for end in ends:
        own = getattr(model.h[end], BOTTLENECK)
        if not narrow:
            own.down, own.up = nn.Identity(), nn.Identity()
        own.up.register_forward_pre_hook(lambda _up, args: wire(args[0]))
    return model


class Constrained(nn.Module):
    """All that layers write to the residual stream lies in one subspace, so its coefficients say all.

    Protocol Models (Ramasinghe et al., 2025): x = embedding + z Uᵀ, and z [..., rank] crosses. U is trained
    with the rest; the embedding is added again behind each border, from the token ids.
    """

    def __init__(self, model: GPT, ends: list[int], wire: Wire, rank: int, seed: int) -> None:
        super().__init__()
        self.gpt, self.ends, self.wire = model, set(ends), wire
        self.basis = nn.Parameter(orthonormal(model.wte.embedding_dim, rank, seed))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        gpt, basis = self.gpt, self.basis
        start = gpt.wte(tokens) + gpt.wpe.weight[: tokens.shape[1]]
        z = start.new_zeros(*tokens.shape, basis.shape[1])
        for number, layer in enumerate(gpt.h):
            z = z + layer.attn(layer.ln_1(start + z @ basis.T)) @ basis
            z = z + layer.mlp(layer.ln_2(start + z @ basis.T)) @ basis
            if number in self.ends:
                z = self.wire(z)
        logits = gpt.lm_head(gpt.ln_f(start + z @ basis.T))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Tracked:
    """A basis of the principal components that lately crossed, which both ends would have to agree on.

    What crosses are the coefficients of x less the token's embedding, which is added again.
    """

    def __init__(self, model: GPT, wire: Wire, rank: int, seed: int) -> None:
        width = model.wte.embedding_dim
        self.gpt, self.wire, self.steps = model, wire, 0
        self.basis, self.covariance = orthonormal(width, rank, seed), torch.zeros(width, width)

    def __call__(self, _layer: nn.Module, _args: Any, x: Tensor) -> Tensor:
        start = self.gpt.start
        rest = x - start
        if self.wire.open:
            flat = rest.detach().flatten(0, 1)
            self.covariance = FORGETS * self.covariance + flat.T @ flat
            if self.steps % EVERY == EVERY // 10:
                self.basis = torch.linalg.eigh(self.covariance)[1][:, -self.basis.shape[1] :].contiguous()
            self.steps += 1
        return start + self.wire(rest @ self.basis) @ self.basis.T


def tracked(model: GPT, ends: list[int], wire: Wire, rank: int, seed: int) -> nn.Module:
    """Coefficients in a `Tracked` basis cross."""

    def keep(_layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        model.start = args[0]

    model.h[0].register_forward_pre_hook(keep)
    for end in ends:
        model.h[end].register_forward_hook(Tracked(model, wire, rank, seed + end))
    return model


def orthonormal(width: int, rank: int, seed: int) -> Tensor:
    """[width, rank], columns orthonormal."""
    drawn = torch.randn(width, rank, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(drawn)[0]


def way(name: str, model: GPT, ends: list[int], wire: Wire, rank: int, seed: int) -> nn.Module:
    """The model as `model(tokens, targets)`; its stages end behind the layers `ends`."""
    ways: Mapping[str, Any] = {
        "as it is": lambda: as_it_is(model, ends, wire),
        "bottleneck": lambda: bottleneck(model, ends, wire, rank, seed),
        "bottleneck without tokens": lambda: bottleneck(model, ends, wire, rank, seed, tokens=False),
        "tokens alone": lambda: bottleneck(model, ends, wire, rank, seed, narrow=False),
        "constrained": lambda: Constrained(model, ends, wire, rank, seed),
        "tracked": lambda: tracked(model, ends, wire, rank, seed),
    }
    found: nn.Module = ways[name]()
    return found
