"""Bottlenecks in the author's model: K features of a token cross a border between stages, not its width.

A bottleneck stands behind a layer of the author's and is a part of it. It multiplies the layer's output down
to K features, which is what crosses, and up again. Which token is where needs no features: every stage has
the ids. So a table of the bottleneck's own gives each token a vector, which is added. Trained bottlenecks
between the stages of a pipeline are the idea of ResBM. That what depends on the token alone is added at each
stage, and only the rest crosses, is that of Protocol Models (Ramasinghe et al., 2025). Where there are no
tokens, as with images, what is the same for all samples needs no features either: a learned `center` takes it
out of the features before the border, and a learned `start` is added behind it, for each position or each
channel.

A codec's steps go by the largest of the features that share a scale. So features begin alike: without what is
the same for all, and in a basis that is turned at random, so that none is much larger than the others.
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
    BottleneckPlace,
    find_places,
    moved_pieces,
    no_bottleneck,
    stage_ends,
)
from hetpeer.stages.tracing.cut import blocks_of, pieces_of
from hetpeer.stages.tracing.operator_line import OperatorLine, Range
from hetpeer.stages.tracing.trace import OpDag, trace


class _Tokens:
    """The ids that the model's embedding got last."""

    ids: Tensor | None = None

    def keep(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], _output: Any
    ) -> None:
        self.ids = args[0] if args else kwargs["input"]


class Bottleneck(nn.Module):
    """x [..., width, ...] → up(down(x) + center) + table[ids] + start, of the same sizes.

    `down` [rank, width] and `up` [width, rank] are linear layers without bias; the input of `up` crosses.
    `dim`: the dimension of the width, 1 or -1. `table` [tokens, width], or None. `start` and `center` are the
    same for every sample, or None; the features are the last dimension of `center`.
    """

    def __init__(
        self,
        width: int,
        rank: int,
        dim: int,
        embedding: nn.Embedding | None,
        tokens: _Tokens,
        seed: int,
        start: Sequence[int] = (),
        center: Sequence[int] = (),
    ) -> None:
        """Begin with an orthogonal projection, the rows of `embedding`, a start and a center of zeros.

        On the meta device there are sizes only. The basis is drawn with `seed`.
        """
        super().__init__()
        self.dim = dim
        self._seed = seed
        self._tokens = tokens
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.table = None if embedding is None else nn.Embedding(*embedding.weight.shape)
        self.center = nn.Parameter(torch.zeros(*center)) if center else None
        self.start = nn.Parameter(torch.zeros(*start)) if start else None
        if self.down.weight.is_meta:
            return
        basis = _orthonormal(width, rank, seed)
        with torch.no_grad():
            self.up.weight.copy_(basis)
            self.down.weight.copy_(basis.T)
            if self.table is not None and embedding is not None:
                self.table.weight.copy_(embedding.weight)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: the layer's output."""
        narrow: Tensor = self.down(x if self.dim == -1 else x.movedim(self.dim, -1))
        if self.center is not None:
            narrow = narrow + self.center
        y: Tensor = self.up(narrow)
        if self.dim != -1:
            y = y.movedim(-1, self.dim)
        if self.table is not None:
            y = y + self.table(self._tokens.ids)
        return y if self.start is None else y + self.start

    def begin_with(self, x: Tensor) -> None:
        """Begin with what is best for `x`, outputs of the layer: their mean and their principal components.

        The components are turned at random: the first would be much larger than the last, and each codec
        rounds several features with one scale (QuaRot, Ashkboos et al., 2024, does so with activations).
        Only for a bottleneck that has a `start` and a `center`.
        """
        assert self.start is not None
        assert self.center is not None
        rank = self.down.out_features
        axis = -1 if self.dim == -1 else self.dim - 1  # of the width in one sample
        mean = x.sum_to_size(self.start.shape) * (self.start.numel() / x.numel())
        varying = (x - mean).movedim(self.dim, -1).flatten(0, -2)
        components = torch.linalg.eigh(varying.T @ varying)[1][:, -rank:]
        basis = components @ _orthonormal(rank, rank, self._seed)
        with torch.no_grad():
            self.up.weight.copy_(basis)
            self.down.weight.copy_(basis.T)
            self.center.copy_(-(mean.movedim(axis, -1) @ basis).view_as(self.center))
            self.start.copy_(mean)


def _orthonormal(width: int, rank: int, seed: int) -> Tensor:
    """[width, rank], drawn with `seed`; its columns are orthonormal."""
    drawn = torch.randn(width, rank, generator=torch.Generator().manual_seed(seed))
    basis: Tensor = torch.linalg.qr(drawn)[0]
    return basis


def _narrow(module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    """The output of a layer, with its first tensor behind the layer's bottleneck."""
    narrow = getattr(module, BOTTLENECK)(_first(output))
    return narrow if isinstance(output, Tensor) else type(output)([narrow, *output[1:]])


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
            bottleneck = Bottleneck(
                place.width,
                bottlenecks.rank,
                place.dim,
                own,
                tokens,
                seed + number,
                place.start,
                _center(place, bottlenecks.rank) if place.centered else (),
            )
        layer.add_module(BOTTLENECK, bottleneck)
        if type(layer).forward is not nn.Sequential.forward:  # which calls its new part by itself
            layer.register_forward_hook(_narrow)


def _center(place: LayerBottleneck, rank: int) -> tuple[int, ...]:
    """Sizes of a center: those of the start, but features for the width, and these last."""
    return (*place.start[:-1], rank) if place.dim == -1 else (rank,)


def _outputs(model: nn.Module, example: Mapping[str, Tensor], layers: Sequence[str]) -> dict[str, Tensor]:
    """First output of each of `layers` for `example`; empty on the meta device.

    Running statistics stay as they were.
    """
    found: dict[str, Tensor] = {}
    if not layers or next(model.parameters()).is_meta:
        return found

    def keeper(name: str) -> Callable[..., None]:
        def keep(_layer: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            found[name] = _first(output).clone()  # a later layer may work in place

        return keep

    hooks = [model.get_submodule(name).register_forward_hook(keeper(name)) for name in layers]
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        with torch.no_grad():
            model(**example)
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _first(output: Any) -> Tensor:
    """The tensor that a layer returns, or the first of a tuple."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(first, Tensor):
        return first
    raise no_bottleneck(f"a layer returns a {type(output).__name__}, and no tensor or tuple of tensors")


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

    def of(place: BottleneckPlace) -> LayerBottleneck:
        tokens = place.embedding == embedding != ""
        return LayerBottleneck(
            layer=place.layer,
            dim=place.dim,
            width=place.width,
            tokens=tokens,
            start=() if tokens else place.start,
            centered=not tokens,
        )

    chosen = Bottlenecks(rank=rank, embedding=embedding, places=tuple(map(of, places)))
    outputs = _outputs(model, example, [place.layer for place in chosen.places if place.start])
    insert(model, chosen, seed)
    for layer, output in outputs.items():
        if output.isfinite().all():
            getattr(model.get_submodule(layer), BOTTLENECK).begin_with(output)
    thin = trace(model, example, autocast=mode.autocast)
    after = OperatorLine(thin)
    widths = " or ".join(map(str, sorted({place.width for place in places})))
    names = ", ".join(place.layer for place in places)
    tell(f"bottlenecks behind {names}: {rank} features cross, not {widths}")
    return thin, blocks_of(after, moved_pieces(before, pieces, after), mode), chosen
