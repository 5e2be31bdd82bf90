"""A task of a divided place as work in segments: one forward, or one backward, for each device.

Between two segments a bundle passes through the arena, as it would between two volunteers: same layout, no
codec, so no bit depends on where a place is divided. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetpeer.stages.block.rounding import UNMEASURED, Rounding
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.ipc.block_commands import Backward, Extents, Forward
from hetpeer.stages.ipc.segmented_work import InSegments, Part
from hetpeer.stages.ipc.worker_messages import Backpropagated, Forwarded

Segments = Sequence[tuple[int, int]]
"""Blocks [begin, end) of each device, in order; those of a task."""


def forward_in_segments(
    command: Forward, segments: Segments, between: Sequence[Extents], specs: Mapping[int, BlockSpec]
) -> InSegments[Forwarded]:
    """`command` in parts. `between`: tensors of the bundle that leaves each segment but the last."""
    parts = []
    entering = command.inputs
    for (begin, end), leaving in zip(segments, (*between, command.outputs), strict=True):
        names = {name for block in range(begin, end) for name in specs[block].data}
        part = replace(
            command,
            versions=command.versions[begin - command.begin : end - command.begin],
            begin=begin,
            end=end,
            inputs=entering,
            data={name: extent for name, extent in command.data.items() if name in names},
            outputs=leaving,
            sparse=command.sparse and begin == command.begin,
        )
        parts.append(Part(begin, part))
        entering = leaving
    return InSegments(tuple(parts), _forwarded)


def backward_in_segments(
    command: Backward, segments: Segments, between: Sequence[Extents]
) -> InSegments[Backpropagated]:
    """`command` in parts, the last segment first. `between`: gradients of the bundles between segments."""
    parts = []
    given = command.output_gradients
    for (begin, end), back in zip(
        reversed(segments), (*reversed(between), command.input_gradients), strict=True
    ):
        part = replace(
            command,
            output_gradients=given,
            input_gradients=back,
            fold=tuple(block for block in command.fold if begin <= block < end),
        )
        parts.append(Part(begin, part))
        given = back
    return InSegments(tuple(parts), _backpropagated)


def _forwarded(parts: Sequence[Forwarded]) -> Forwarded:
    """The last part has loss and hits. Other microbatches follow as fast as the slowest device."""
    return replace(parts[-1], seconds=max(part.seconds for part in parts))


def _backpropagated(parts: Sequence[Backpropagated]) -> Backpropagated:
    return Backpropagated(
        seconds=max(part.seconds for part in parts), rounding=_rounding([part.rounding for part in parts])
    )


def _rounding(parts: Sequence[Rounding]) -> Rounding:
    """Effect of rounding on the whole, from the `parts`, the last segment first.

    What one segment's rounding becomes in the next is not in it: the factor ROOM is far larger.
    """
    if UNMEASURED in parts:
        return UNMEASURED
    return Rounding(
        output=parts[0].output,
        gradient=parts[-1].gradient,
        sums=tuple(length for part in reversed(parts) for length in part.sums),
        relative=max(part.relative for part in parts),
    )
