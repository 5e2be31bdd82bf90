"""Cutting the graph into blocks, and an even division of blocks among stages.

Operators are in the author's order, and a border is a place between two of them. Good borders are *narrow*: a
single tensor crosses, as between the halves of a transformer layer. Pieces between narrow borders that repeat
(attention, MLP, attention, MLP, …) are joined to one block for each repetition, and pieces with next to no
weight join a neighbour. Layers without a narrow border between them (the levels of a U-Net, whose skips pass
all that lies below them) are cut where few bytes cross. Cheap values that depend on no parameter (positions,
masks) are not cut: each block gets its own copy.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.tracing.assemble import ComputeMode, make_block
from hetpeer.stages.tracing.operator_line import OperatorLine, Range, why_together
from hetpeer.stages.tracing.trace import OpDag

_log = logging.getLogger(__name__)

TINY = 1 / 16
"""A piece below this fraction of the heaviest one's FLOPs, and of its parameters, is not worth a border."""

WORTH = 1 / 8
"""A cut is useful if both sides have at least this fraction of an even share of all FLOPs."""

GLUED = 1 / 8
"""Layers without a narrow border between them are cut if they have more than this fraction of all FLOPs."""

DEARER = 3
"""Largest number of times as many bytes as at the narrow borders that cross where such layers are cut."""

PLAIN = ComputeMode()


def cut_blocks(
    dag: OpDag, target_blocks: int | None = None, mode: ComputeMode = PLAIN, *, at_least: int = 1
) -> list[BlockSpec]:
    """Cut the graph into blocks, in order; about one for each repeated layer unless `target_blocks` is given.

    With `target_blocks`, neighbours are joined evenly, or pieces are cut where few bytes cross; there are
    fewer blocks only if the graph has no more borders. `at_least`: blocks that the caller needs; for these
    layers are cut even where many bytes cross, and a warning says why. Raises LocalError HP-MODEL-005 for no
    blocks at all, or fewer than `at_least`.
    """
    if target_blocks is not None and target_blocks < 1:
        raise too_few(f"a model cannot be cut into {target_blocks} blocks")
    line = OperatorLine(dag)
    return blocks_of(line, pieces_of(line, target_blocks, at_least=at_least), mode)


def pieces_of(line: OperatorLine, target_blocks: int | None = None, *, at_least: int = 1) -> list[Range]:
    """The pieces of the line that become blocks, as `cut_blocks` says."""
    pieces = _merge_tiny(line, _join_repeats(line, line.narrow_pieces()))
    if target_blocks is None:
        pieces = _divide_glued(line, pieces)
    elif len(pieces) > target_blocks:
        grouped = even_ranges([line.flops(piece) for piece in pieces], [1.0] * target_blocks)
        pieces = [(pieces[begin][0], pieces[end - 1][1]) for begin, end in grouped]
    else:
        pieces = _refine(line, pieces, target_blocks)
    if len(pieces) < at_least:
        pieces = _force(line, pieces, at_least)
    return pieces


def blocks_of(line: OperatorLine, pieces: Sequence[Range], mode: ComputeMode = PLAIN) -> list[BlockSpec]:
    """The blocks that compute the pieces of a line, in order."""
    return [
        make_block(
            line.dag,
            index,
            line.nodes[begin:end],
            (line.crossing(begin), line.crossing(end)),
            line.copied,
            mode,
        )
        for index, (begin, end) in enumerate(pieces)
    ]


def _force(line: OperatorLine, pieces: list[Range], count: int) -> list[Range]:
    """Cut pieces until there are `count`, wherever that is possible.

    Raises LocalError HP-MODEL-005 if there are fewer, and warns if more bytes cross than elsewhere.
    """
    heaviest = max(pieces, key=line.flops)
    refined = _refine(line, pieces, count)
    if len(refined) < count:
        places = f"the model has {len(refined) - 1} places to cut"
        raise too_few(
            f"{len(refined)} blocks cannot be shared out to {count} stages",
            f"{places}; in its heaviest part {why_together(line, heaviest)}",
        )
    usual = max((line.bytes_at(begin) for begin, _ in pieces[1:]), default=0)
    widest = max(refined[1:], key=lambda piece: line.bytes_at(piece[0]))[0]
    if usual and line.bytes_at(widest) > DEARER * usual:
        _log.warning(
            "for %d stages the model is cut where %.3g MiB cross with each microbatch, and elsewhere at most "
            "%.3g: %s",
            count,
            line.bytes_at(widest) / 2**20,
            usual / 2**20,
            why_together(line, heaviest),
        )
    return refined


def _divide_glued(line: OperatorLine, pieces: list[Range]) -> list[Range]:
    """Cut heavy parts without a narrow border in which several layers lie, where bytes are few enough."""
    all_flops = line.flops(line.whole)

    def glued(part: Range) -> bool:
        return line.flops(part) > GLUED * all_flops and len(line.layers(part)) > 1

    usual = max((line.bytes_at(begin) for begin, _ in pieces[1:]), default=0)
    edges = {0, *(end for _, end in pieces)}
    waiting = list(filter(glued, line.narrow_pieces()))
    while waiting:
        part = waiting.pop()
        cut = _moderate_cut(line, part, WORTH * GLUED * all_flops, DEARER * usual or math.inf)
        if cut is not None:
            usual = usual or line.bytes_at(cut)
            edges.add(cut)
            waiting += filter(glued, [(part[0], cut), (cut, part[1])])
    return list(itertools.pairwise(sorted(edges)))


def _moderate_cut(line: OperatorLine, part: Range, floor: float, nbytes: float) -> int | None:
    """Where to cut `part` such that at most `nbytes` cross: if possible between its outer quarters.

    None if there is no such place, or only with less than `floor` FLOPs on a side.
    """
    for least in (line.flops(part) / 4, floor):
        found = _best_cut(line, part, least)
        if found is not None and not found[0] and found[1] <= nbytes:
            return found[-1]
    return None


def _join_repeats(line: OperatorLine, pieces: list[Range]) -> list[Range]:
    """Join the longest run of repeating pieces to one piece for each repetition."""
    kinds = [line.signature(piece) for piece in pieces]
    longest, period, start = 0, 1, 0
    for step in range(1, len(kinds) // 2 + 1):
        same = [kinds[i] == kinds[i + step] for i in range(len(kinds) - step)]
        position = 0
        for equal, group in itertools.groupby(same):
            run = len(list(group))
            repeats = run // step + 1
            if equal and repeats > 1 and repeats * step > longest:
                longest, period, start = repeats * step, step, position
            position += run
    joined = [
        (pieces[first][0], pieces[first + period - 1][1]) for first in range(start, start + longest, period)
    ]
    return [*pieces[:start], *joined, *pieces[start + longest :]]


def _merge_tiny(line: OperatorLine, pieces: list[Range]) -> list[Range]:
    """Join pieces that compute next to nothing with each other, then those without any weight with a
    neighbour.

    The first is for embedding tables: no FLOPs but many parameters, so together they stay a block. The second
    goes over the border with more bytes (logits stay with their loss), else to the later neighbour.
    """
    flops_floor = TINY * max(line.flops(piece) for piece in pieces)
    bytes_floor = TINY * max(line.parameter_bytes(piece) for piece in pieces)
    merged: list[Range] = []
    for idle, group in itertools.groupby(pieces, key=lambda piece: line.flops(piece) < flops_floor):
        run = list(group)
        merged += [(run[0][0], run[-1][1])] if idle else run

    def tiny(piece: Range) -> bool:
        return line.flops(piece) < flops_floor and line.parameter_bytes(piece) < bytes_floor

    while (small := next((i for i, piece in enumerate(merged) if tiny(piece)), None)) is not None:
        ends = [i for i in (small, small + 1) if 0 < i < len(merged)]
        end = max(ends, key=lambda i: (line.bytes_at(merged[i][0]), i))
        merged[end - 1 : end + 1] = [(merged[end - 1][0], merged[end][1])]
    return merged


def _refine(line: OperatorLine, pieces: list[Range], target: int) -> list[Range]:
    """Cut pieces until there are `target`: the heaviest where no more bytes cross than at present borders.

    Then where the fewest bytes cross. Cuts that take next to nothing off a piece (the loss off its logits)
    come last.
    """
    pieces = list(pieces)
    floor = WORTH * line.flops(line.whole) / target
    usual = max((line.bytes_at(begin) for begin, _ in pieces[1:]), default=0)
    cuts = {piece: cut for piece in pieces if (cut := _best_cut(line, piece, floor))}

    def order(piece: Range) -> tuple[Any, ...]:
        useless, nbytes, _, _ = cuts[piece]
        weight = -line.flops(piece)
        return (0, weight) if not useless and nbytes <= usual else (1, useless, nbytes, weight)

    while len(pieces) < target and (divisible := [piece for piece in pieces if piece in cuts]):
        piece = min(divisible, key=order)
        position = cuts[piece][-1]
        parts = [(piece[0], position), (position, piece[1])]
        at = pieces.index(piece)
        pieces[at : at + 1] = parts
        cuts |= {part: cut for part in parts if (cut := _best_cut(line, part, floor))}
    return pieces


def _best_cut(line: OperatorLine, piece: Range, floor: float) -> tuple[bool, int, int, int] | None:
    """(a side is below `floor`, bytes crossing, difference of sides' FLOPs, position); None: no border."""
    begin, end = piece
    whole = line.flops(piece)
    found = []
    for position in range(begin + 1, end):
        if position in line.borders:
            left = line.flops((begin, position))
            useless = min(left, whole - left) < floor
            found.append((useless, line.bytes_at(position), abs(whole - 2 * left), position))
    return min(found, default=None)


def balanced_ranges(
    blocks: Sequence[BlockSpec], stages: int, weights: Sequence[float] | None = None
) -> list[tuple[int, int]]:
    """Contiguous block ranges [begin, end), one for each stage, that make the slowest stage as fast as
    possible.

    A stage's time is its blocks' forward and backward FLOPs over its `weight` (relative speed, 1 by default).
    Among equals the sum of squares is least, so that a bottleneck elsewhere does not leave a stage idle.
    Exact, by dynamic programming. Raises LocalError HP-MODEL-005 if there are fewer blocks than stages.
    """
    if not 1 <= stages <= len(blocks):
        raise too_few(f"{len(blocks)} blocks cannot be shared out to {stages} stages")
    if weights is not None and len(weights) != stages:
        raise ValueError(f"{len(weights)} weights for {stages} stages")
    return even_ranges([3 * block.flops_forward for block in blocks], weights or [1.0] * stages)


def too_few(what: str, why: str = "each stage holds at least one block") -> LocalError:
    """HP-MODEL-005."""
    fix = "ask for at least one stage and one block, and no more stages than blocks"
    return LocalError("HP-MODEL-005", what, why=why, fix=fix, exit_code=ExitCode.CONFIG)


def even_ranges(costs: Sequence[int], weights: Sequence[float]) -> list[Range]:
    """Split `costs` into len(weights) non-empty ranges: least maximum of cost / weight, then least sum of
    squares.

    There are at least as many costs as weights. Takes O(stages · costs²) time and O(stages · costs) memory.
    """
    sums = np.array([0, *itertools.accumulate(costs)], dtype=np.float64)
    positions = range(len(sums))
    # between[begin, end]: the cost of that range, infinite if it is empty.
    between = np.where(np.less.outer(positions, positions), sums[np.newaxis] - sums[:, np.newaxis], np.inf)

    def best(limit: float) -> tuple[float, list[Range]]:
        # score[end]: the best way to give costs[:end] to the stages so far. Without a limit "best" is the
        # least maximum, with one the least sum of squares below it.
        score = np.where(np.arange(len(sums)) == 0, 0.0, np.inf)
        chosen = []
        for weight in weights:
            times = between / weight
            if math.isinf(limit):
                totals = np.maximum(score[:, np.newaxis], times)
            else:
                totals = score[:, np.newaxis] + np.where(times <= limit, times * times, np.inf)
            chosen.append(totals.argmin(axis=0))
            score = totals.min(axis=0)
        ranges: list[Range] = []
        end = len(costs)
        for begin_of in reversed(chosen):
            begin = int(begin_of[end])
            ranges.insert(0, (begin, end))
            end = begin
        return float(score[-1]), ranges

    slowest, _ = best(math.inf)
    return best(slowest)[1]
