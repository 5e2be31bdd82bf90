"""Small net in torch that simulated volunteers train: float32, clipped AdamW as the daemon applies it.

The loss curve of a history with faults is that of one process that trains the same net on the same data
(`train_alone`), up to the order of additions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from hetpeer.averaging.optim.update_rules import rule_of
from hetpeer.averaging.reduce.tied_parameters import Tie, Ties
from hetpeer.stages.block.exact_numerics import squared_norm
from hetpeer.stages.block.fingerprint import Fingerprint, fingerprint

WIDTH, SAMPLES, CLASSES = 16, 8, 5
SHARED = CLASSES * WIDTH
"""Elements of the classifier's weight, which is tied to the first rows of the first block's weight."""
SETTINGS: Mapping[str, Any] = {
    "name": "AdamW",
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "learning_rate": 3e-3,
    "weight_decay": 0.01,
}


@dataclass(frozen=True, slots=True)
class ToyState:
    """A block's flat parameters, AdamW's two moments, and how many updates were applied."""

    parameters: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    version: int


class ToyNet:
    """`blocks` blocks of Linear and tanh, the last one a classifier whose weight is tied to the first
    block's.

    `CheckedNumerics` for the simulated swarm.
    """

    def __init__(self, blocks: int = 4, seed: int = 0, settings: Mapping[str, Any] = SETTINGS) -> None:
        self.blocks = blocks
        self.ties = (Tie(uses=((0, 0, SHARED), (blocks - 1, 0, SHARED))),)
        self._seed = seed
        self._rule = rule_of(settings)

    def _layer(self, block: int) -> nn.Linear:
        return nn.Linear(WIDTH, CLASSES if block == self.blocks - 1 else WIDTH)

    @property
    def sizes(self) -> Mapping[int, int]:
        return {b: sum(p.numel() for p in self._layer(b).parameters()) for b in range(self.blocks)}

    def initial(self, block: int) -> ToyState:
        flat = self._drawn(block)
        if block == self.blocks - 1:
            flat[:SHARED] = self._drawn(0)[:SHARED]
        return ToyState(flat, torch.zeros_like(flat), torch.zeros_like(flat), 0)

    def _drawn(self, block: int) -> Tensor:
        torch.manual_seed(1000 * self._seed + block)
        return torch.cat([p.detach().flatten() for p in self._layer(block).parameters()])

    def microbatch(self, step: int, number: int) -> tuple[Tensor, Tensor]:
        """Inputs [SAMPLES, WIDTH] and classes [SAMPLES] that a net can learn: a fixed random teacher's."""
        generator = torch.Generator().manual_seed((self._seed * 100_003 + step) * 1009 + number)
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        teacher = torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(self._seed))
        return x, (x @ teacher).argmax(dim=1)

    # ── forward and backward ────────────────────────────────────────────────────────────────────────────────

    def _run(self, block: int, flat: Tensor, x: Tensor) -> Tensor:
        """Block `block` with the parameters `flat`."""
        outputs = CLASSES if block == self.blocks - 1 else WIDTH
        weight, bias = flat[: outputs * WIDTH].view(outputs, WIDTH), flat[outputs * WIDTH :]
        y = nn.functional.linear(x, weight, bias)
        return y if block == self.blocks - 1 else torch.tanh(y)

    def forward(
        self, states: Sequence[ToyState], begin: int, microbatch: tuple[int, int], bundle: Any
    ) -> tuple[Any, Any]:
        inputs, classes = self.microbatch(*microbatch)
        entered = inputs if begin == 0 else bundle.clone().requires_grad_()
        parameters = [state.parameters.clone().requires_grad_() for state in states]
        x = entered
        for offset, flat in enumerate(parameters):
            x = self._run(begin + offset, flat, x)
        if begin + len(states) == self.blocks:
            loss = nn.functional.cross_entropy(x, classes)
            return (entered, parameters, loss), loss.item()
        return (entered, parameters, x), x.detach()

    def backward(self, kept: Any, gradient: Any) -> tuple[Any, list[Tensor]]:
        entered, parameters, output = kept
        torch.autograd.backward(output, gradient)
        return entered.grad, [flat.grad for flat in parameters]

    # ── reduce and apply ────────────────────────────────────────────────────────────────────────────────────

    def add(self, gradients: Iterable[Tensor]) -> Tensor:
        first, *others = gradients
        total = first.clone()
        for other in others:
            total.add_(other)
        return total

    def shard(self, gradient: Tensor, begin: int, end: int) -> Tensor:
        return gradient[begin:end].clone()

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards))

    def tie(self, block: int, gradient: Tensor, tied: Mapping[int, tuple[int, Tensor]]) -> Tensor:
        total = gradient.clone()
        for use, uses in Ties(self.ties).of(block):
            parts = {
                block: gradient[use.begin : use.end],
                **{
                    u.block: tied[u.block][1][u.begin - tied[u.block][0] :][:SHARED] for u in uses if u != use
                },
            }
            total[use.begin : use.end] = self.add(parts[u.block] for u in uses)
        return total

    def fingerprint(self, gradient: Tensor, shard: tuple[int, int, int], key: bytes) -> Fingerprint:
        block, begin, _ = shard
        return fingerprint(gradient.numpy(), block, begin, key)

    def lie(self, gradient: Tensor, by: str) -> Tensor:
        return -gradient

    def mark(self, bundle: Tensor, key: bytes) -> Fingerprint:
        return fingerprint(bundle.flatten().numpy(), 0, 0, key)

    def forge(self, bundle: Tensor, by: str) -> Tensor:
        return -bundle

    def inspect(self, block: int, gradient: Tensor) -> tuple[str, float]:
        counted = Ties(self.ties).counted(block, len(gradient))
        return _digest(gradient), sum(squared_norm(gradient[begin:end]) for begin, end in counted)

    def apply(self, state: ToyState, gradient: Tensor, coefficient: float) -> ToyState:
        after = ToyState(
            state.parameters.clone(), state.exp_avg.clone(), state.exp_avg_sq.clone(), state.version + 1
        )
        self._rule.apply(
            parameters=after.parameters,
            state={"exp_avg": after.exp_avg, "exp_avg_sq": after.exp_avg_sq},
            gradient=gradient,
            coefficient=coefficient,
            update=after.version,
            step=after.version,
        )
        return after

    def parameters(self, state: ToyState, begin: int, end: int) -> Tensor:
        return state.parameters[begin:end]

    def install(self, state: ToyState, total: Tensor, coefficient: float, copy: ToyState) -> ToyState:
        mean = total * coefficient
        if state.version != copy.version:
            mean = state.parameters + (mean - copy.parameters)
        return ToyState(mean, state.exp_avg, state.exp_avg_sq, state.version + 1)

    def digest(self, state: ToyState) -> str:
        return _digest(torch.cat([state.parameters, state.exp_avg, state.exp_avg_sq]))

    def shared(self, state: ToyState, begin: int, end: int) -> str:
        return _digest(state.parameters[begin:end])

    def check_loss(self, step: int, ids: Collection[int], loss: float) -> bool:
        return math.isfinite(loss)

    def check_final(self, block: int, bases: Sequence[Mapping[int, int]], state: ToyState) -> bool:
        return state.version == len(bases)

    def train_alone(self, bases: Sequence[int], microbatches: int, clip_norm: float | None) -> list[float]:
        """Mean loss of each step when one process does everything, by torch's own optimizer and clipping.

        `bases`: with which version's parameters each step is computed.
        """
        drawn = [self.initial(block).parameters for block in range(self.blocks)]
        shared = drawn[0][:SHARED].clone().requires_grad_()
        own = [
            (flat[SHARED:] if block in (0, self.blocks - 1) else flat).clone().requires_grad_()
            for block, flat in enumerate(drawn)
        ]
        optimizer = torch.optim.AdamW(
            [shared, *own],
            lr=SETTINGS["learning_rate"],
            betas=SETTINGS["betas"],
            eps=SETTINGS["eps"],
            weight_decay=SETTINGS["weight_decay"],
            foreach=False,
        )
        losses: list[float] = []
        versions: list[Tensor] = []
        for step, base in enumerate(bases):
            optimizer.zero_grad()
            versions.append(parameters_to_vector([shared, *own]).detach().clone())
            vector_to_parameters(versions[base].clone(), [shared, *own])
            total = 0.0
            for number in range(microbatches):
                x, classes = self.microbatch(step, number)
                for block, flat in enumerate(own):
                    tied = block in (0, self.blocks - 1)
                    x = self._run(block, torch.cat([shared, flat]) if tied else flat, x)
                loss = nn.functional.cross_entropy(x, classes)
                torch.autograd.backward(loss)
                total += loss.item()
            vector_to_parameters(versions[step].clone(), [shared, *own])
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([shared, *own], clip_norm, foreach=False)
            optimizer.step()
            losses.append(total / microbatches)
        return losses


def _digest(flat: Tensor) -> str:
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest()
