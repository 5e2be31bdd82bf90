"""Sparse outer updates compared with dense ones: bytes of an averaging, and loss after the same tokens.

One process, no network: clusters take turns at batches of their own, with the product's outer rule, codec and
sum of movements. All ways see the same batches. The learning rate rises in the first steps, then falls to a
tenth in a straight line. `none` does not average at all, so it says whether the loss tells ways apart. The
loss is that of the first cluster's parameters, which a run would store. Bytes are counted from the plan of an
averaging at each member, without heads. With `--keep FOLDER` it goes on where it was cut.

    python -m benchmarks.sparse_outer
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks import report
from benchmarks.kept_rows import add_keeping, commits, measured_rows
from benchmarks.sparse import text
from hetpeer.averaging import messages as m
from hetpeer.averaging.optim.outer_optimizer import OuterNesterov, outer_of
from hetpeer.averaging.reduce.holder_reduce import Reduction
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.bootstrap.run.settings import SPARSE_OUTER
from hetpeer.examples.gpt import GPT
from hetpeer.stages.worker.holding.movement import CODEC
from hetpeer.stages.worker.movement_sums import summed_movements
from hetpeer.stages.worker.vector_sums import added_up

CONTEXT, BATCH, HELD_OUT = 64, 16, 128
WARM_UP, FINAL = 20, 0.1
"""Steps in which the learning rate rises, and the last one of its largest."""
WAYS: Mapping[str, Mapping[str, Any] | None] = {
    "dense": {"learning_rate": 0.7, "momentum": 0.9},
    "dense, no momentum": {"learning_rate": 1.0, "momentum": 0.0},
    "sparse": SPARSE_OUTER | {"sparse": True},
    "sparse, momentum": {"learning_rate": 0.7, "momentum": 0.9, "sparse": True},
    "none": None,
}
SIZES = {"width": 64, "layers": 2, "clusters": 4, "interval": 5, "averagings": 200, "rate": 3e-3}
"""Default sizes; `rate` is the largest learning rate."""
MOST_WORSE, LEAST_FEWER = 0.01, 100.0
"""Goals: held-out loss compared with the best dense way, and how many times fewer bytes."""


def sent_bytes(clusters: int, elements: int, *, sparse: bool) -> int:
    """Bytes that all members together send in one averaging of a block of `elements`."""
    peers = tuple(map(str, range(clusters)))
    cover = m.Cover(
        block=0,
        slots=tuple((peer, (number,)) for number, peer in enumerate(peers)),
        reducers=tuple((peer, 1) for peer in peers),
        receivers=peers,
    )
    plan = m.Plan(line=m.TermView(term=1, view=0), step=0, plan=1, covers=(cover,))
    sent = 0
    for peer in peers:
        outgoing = Reduction(peer, plan, {0: elements}, Ties(), by_all=Ties() if sparse else None).outgoing()
        sent += sum(CODEC.nbytes(count) if sparse else 4 * count for count in outgoing.values())
    return sent


@dataclass
class Cluster:
    """A cluster's model, optimizer and outer state; all begin with the same parameters."""

    model: GPT
    rule: OuterNesterov | None
    draw: torch.Generator
    state: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        flat = self.parameters()
        if self.rule is not None:
            names = ("outer_anchor", "outer_momentum")
            self.state = {name: torch.zeros_like(flat) for name in names}
            self.rule.begin(parameters=flat, state=self.state)

    def parameters(self) -> Tensor:
        """A copy of the parameters as one vector."""
        return parameters_to_vector(self.model.parameters()).detach().clone()

    def train(self, data: Tensor, rate: float) -> None:
        """One batch, at this learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        self.model(*samples(data, BATCH, self.draw)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def sends(self, parameters: Tensor) -> Tensor:
        """The vector that the others get: its parameters, or the sent part of its movement."""
        assert self.rule is not None
        if not self.rule.sparse:
            return parameters
        moved = self.rule.moved(parameters=parameters, state=self.state)
        data = memoryview(bytearray(CODEC.nbytes(len(moved))))
        CODEC.encode(moved, data)
        return CODEC.decode(data, len(moved))

    def install(self, parameters: Tensor, sent: Tensor, total: Tensor, share: float) -> None:
        """Go on from the mean, or follow the mean movement."""
        assert self.rule is not None
        if self.rule.sparse:
            self.rule.follow(parameters=parameters, state=self.state, sent=sent, total=total, share=share)
        else:
            parameters.copy_(total * share)
            self.rule.apply(parameters=parameters, state=self.state)
        vector_to_parameters(parameters, self.model.parameters())


def samples(data: Tensor, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` pieces of text, each with what follows."""
    begins = torch.randint(0, len(data) - CONTEXT - 1, (count,), generator=draw)
    drawn = torch.stack([data[begin : begin + CONTEXT + 1] for begin in begins])
    return drawn[:, :-1], drawn[:, 1:]


def scheduled(step: int, steps: int) -> float:
    """The learning rate of a step, from 0, of its largest."""
    return min(1.0, (step + 1) / WARM_UP) * (1.0 - (1.0 - FINAL) * step / steps)


def average(clusters: list[Cluster]) -> None:
    """One averaging of all."""
    own = [one.parameters() for one in clusters]
    parts = [one.sends(parameters) for one, parameters in zip(clusters, own, strict=True)]
    sparse = clusters[0].rule is not None and clusters[0].rule.sparse
    total = summed_movements(parts) if sparse else added_up(parts)
    for one, parameters, sent in zip(clusters, own, parts, strict=True):
        one.install(parameters, sent, total, 1 / len(clusters))


def trained(data: Tensor, way: str, seed: int, options: Any) -> dict[str, Any]:
    """Held-out loss, averaging by averaging; of the first cluster where none averages."""
    settings, clusters = WAYS[way], list[Cluster]()
    steps = options.averagings * options.interval
    border = len(data) * 9 // 10
    for number in range(options.clusters):
        torch.manual_seed(seed)
        model = GPT(options.width, options.layers, options.width // 32, CONTEXT, 256)
        draw = torch.Generator().manual_seed(1000 * seed + number)
        clusters.append(Cluster(model, None if settings is None else outer_of(settings), draw))
    held_out, losses = samples(data[border:], HELD_OUT, torch.Generator().manual_seed(seed)), []
    for outer in range(options.averagings):
        for one in clusters:
            for step in range(options.interval):
                one.train(data[:border], options.rate * scheduled(outer * options.interval + step, steps))
        if settings is not None:
            average(clusters)
        with torch.no_grad():
            losses.append(float(clusters[0].model(*held_out)))
        print(f"{way}, seed {seed}, averaging {outer + 1}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return {"way": way, "seed": seed, "loss": losses[-1], "losses": losses}


def measure(options: Any) -> dict[str, Any]:
    """Every way, with several seeds."""
    data = text()
    elements = sum(p.numel() for p in GPT(options.width, options.layers, 1, CONTEXT, 256).parameters())
    sizes = {name: getattr(options, name) for name in SIZES} | {"tokens": len(data)}
    rows = measured_rows(
        options,
        [
            (sizes | {"way": way, "seed": seed}, trained, (data, way, seed, options))
            for seed in range(options.seed, options.seed + options.seeds)
            for way in options.ways
        ],
    )
    runs = {way: [row for row in rows if row["way"] == way] for way in options.ways}
    losses = {way: statistics.fmean(run["loss"] for run in of) for way, of in runs.items() if of}
    sent = {
        count: {
            kind: sent_bytes(count, elements, sparse=kind == "sparse") / count for kind in ("dense", "sparse")
        }
        for count in (2, 3, 4, 5, 8, 16)
    }
    here = sent.get(options.clusters, sent[4])
    fewer = here["dense"] / here["sparse"]
    figures: dict[str, Any] = {
        "parameters": elements,
        "clusters": options.clusters,
        "interval": options.interval,
        "rate": options.rate,
        "averagings": options.averagings,
        "tokens": options.clusters * options.interval * options.averagings * BATCH * CONTEXT,
        "bytes_a_member": sent,
        "fewer": fewer,
        "commits": commits(rows),
        "losses": losses,
        "runs": runs,
    }
    return figures | judged(losses, fewer)


def judged(losses: Mapping[str, float], fewer: float) -> dict[str, Any]:
    """How much worse sparse updates are than the best dense ones, and whether the goals are met."""
    dense = [loss for way, loss in losses.items() if way.startswith("dense")]
    if not dense or "sparse" not in losses:
        return {}
    worse = losses["sparse"] / min(dense) - 1
    return {"worse": worse, "met": worse <= MOST_WORSE and fewer >= LEAST_FEWER}


def show(figures: dict[str, Any]) -> None:
    print(f"{figures['parameters']:,} parameters, {figures['tokens']:,} tokens")
    for count, sent in figures["bytes_a_member"].items():
        print(
            f"{count} clusters: a member sends {sent['dense']:,.0f} bytes dense, {sent['sparse']:,.0f} "
            f"sparse "
            f"({sent['dense'] / sent['sparse']:.0f} times fewer)"
        )
    usual = min((loss for way, loss in figures["losses"].items() if way.startswith("dense")), default=None)
    for way, loss in figures["losses"].items():
        apart = "" if usual is None else f" ({100 * (loss / usual - 1):+.2f} %)"
        print(f"{way:25} held-out loss {loss:.4f}{apart}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"(default: {value:g})")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each way (default: 1)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    add_keeping(parser)
    options = parser.parse_args()
    return report.finish(f"sparse-outer-{options.width}", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
