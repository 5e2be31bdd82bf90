"""Bottlenecks in the author's model: K features of a token cross a border between stages, not its width.

A bottleneck stands behind a layer of the author's and is a part of it. It multiplies the layer's output down
to K features, which is what crosses, and up again. Which token is where needs no features: every stage has
the ids. So a table of the bottleneck's own gives each token a vector, which is added. Trained bottlenecks
between the stages of a pipeline are the idea of ResBM. That what depends on the token alone is added at each
stage, and only the rest crosses, is that of Protocol Models (Ramasinghe et al., 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetpeer.bootstrap.run.run_directory import Bottlenecks, LayerBottleneck
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.operators.names import BOTTLENECK
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.bottleneck_places import (
    find_places,
    moved_pieces,
    no_bottleneck,
    stage_ends,
)
from hetpeer.stages.tracing.cut import blocks_of, pieces_of
from hetpeer.stages.tracing.operator_line import OperatorLine, Range
from hetpeer.stages.tracing.trace import OpDag, trace


class Bottleneck(nn.Module):
    """x [..., width, ...] → up(down(x)) + table[ids], of the same sizes.

    `down` [rank, width] and `up` [width, rank] are linear layers without bias. `dim`: the dimension of the
    width, 1 or -1. `table` [tokens, width], or None.
    """

    def __init__(self, width: int, rank: int, dim: int, embedding: nn.Embedding | None, seed: int) -> None:
        """Begin with an orthogonal projection, and with the rows of `embedding`.

        On the meta device there are sizes only. The basis is drawn with `seed`.
        """
        super().__init__()
        self.dim = dim
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.table = None if embedding is None else nn.Embedding(*embedding.weight.shape)
        if self.down.weight.is_meta:
            return
        drawn = torch.randn(width, rank, generator=torch.Generator().manual_seed(seed))
        basis = torch.linalg.qr(drawn)[0]
        with torch.no_grad():
            self.up.weight.copy_(basis)
            self.down.weight.copy_(basis.T)
            if self.table is not None and embedding is not None:
                self.table.weight.copy_(embedding.weight)

    def forward(self, x: Tensor, ids: Tensor | None) -> Tensor:
        """`ids` [...]: the tokens, if there is a table."""
        if self.dim == -1:
            y: Tensor = self.up(self.down(x))
        else:
            y = self.up(self.down(x.movedim(self.dim, -1))).movedim(-1, self.dim)
        return y if self.table is None else y + self.table(ids)


class _Tokens:
    """The ids that the model's embedding got last."""

    ids: Tensor | None = None

    def keep(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], _output: Any
    ) -> None:
        self.ids = args[0] if args else kwargs["input"]

    def narrow(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """The output of a layer, with its first tensor behind the layer's bottleneck."""
        bottleneck = getattr(module, BOTTLENECK)
        if isinstance(output, Tensor):
            return bottleneck(output, self.ids)
        if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
            return type(output)([bottleneck(output[0], self.ids), *output[1:]])
        raise no_bottleneck(f"a layer returns a {type(output).__name__}, and no tensor or tuple of tensors")


def insert(model: nn.Module, bottlenecks: Bottlenecks, seed: int, part: str = "") -> None:
    """Put bottlenecks into `model`: each becomes a part of its layer and changes the layer's output.

    `part`: the path of `model` in the author's module, of which `bottlenecks` has the paths. `seed` and the
    number of the bottleneck give its basis. Raises `LocalError` HP-MODEL-007 if a layer is not there.
    """
    prefix = f"{part}." if part else ""
    tokens = _Tokens()
    try:
        found = [model.get_submodule(place.layer.removeprefix(prefix)) for place in bottlenecks.places]
        path = bottlenecks.embedding.removeprefix(prefix)
        embedding = model.get_submodule(path) if path else None
    except AttributeError as error:
        raise LocalError(
            "HP-MODEL-007",
            "the model is not the one of this run any more",
            why=str(error),
            fix="restore the module as it was at hetpeer init",
            exit_code=ExitCode.VERSION,
        ) from error
    table = embedding if isinstance(embedding, nn.Embedding) else None
    if table is not None:
        table.register_forward_hook(tokens.keep, with_kwargs=True)
    for number, (layer, place) in enumerate(zip(found, bottlenecks.places, strict=True)):
        own = table if place.tokens else None
        with next(model.parameters()).device:
            bottleneck = Bottleneck(place.width, bottlenecks.rank, place.dim, own, seed + number)
        layer.add_module(BOTTLENECK, bottleneck)
        layer.register_forward_hook(tokens.narrow)


def narrowed(
    model: nn.Module,
    example: Mapping[str, Tensor],
    dag: OpDag,
    stages: Sequence[Sequence[Range]],
    rank: int,
    mode: ComputeMode,
    *,
    at_least: int,
    seed: int,
    tell: Callable[[str], None],
) -> tuple[OpDag, list[BlockSpec], Bottlenecks]:
    """Put bottlenecks of `rank` between the stages of `model`; the graph and the blocks with them.

    `dag`: the model without; `stages`: its layouts, which stay as they are. Raises `LocalError`
    HP-RUN-001 for a rank that makes nothing narrower, HP-MODEL-018 if no border can have a bottleneck.
    """
    before = OperatorLine(dag)
    cut = pieces_of(before, at_least=at_least)
    places, pieces, left = find_places(before, cut, stage_ends(stages))
    if not places:
        raise no_bottleneck(left[0] if left else "there is one stage, and so no border")
    for line in left:
        tell(line)
    least = min(places, key=lambda place: place.width)
    if rank >= least.width:
        raise LocalError(
            "HP-RUN-001",
            f"--bottleneck {rank} is no bottleneck",
            why=f"the output of {least.layer} has {least.width} features",
            fix=f"choose fewer than {least.width}, for instance {max(least.width // 16, 1)}",
            exit_code=ExitCode.CONFIG,
        )
    embedding = next((place.embedding for place in places if place.embedding), "")
    chosen = Bottlenecks(
        rank=rank,
        embedding=embedding,
        places=tuple(
            LayerBottleneck(
                layer=place.layer, dim=place.dim, width=place.width, tokens=place.embedding == embedding != ""
            )
            for place in places
        ),
    )
    insert(model, chosen, seed)
    thin = trace(model, example, autocast=mode.autocast)
    after = OperatorLine(thin)
    widths = " or ".join(map(str, sorted({place.width for place in places})))
    names = ", ".join(place.layer for place in places)
    tell(f"bottlenecks behind {names}: {rank} features cross, not {widths}")
    return thin, blocks_of(after, moved_pieces(before, pieces, after), mode), chosen
