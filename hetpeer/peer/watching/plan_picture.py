"""SVG picture of a plan: a row for each pipeline, a box for each device with its load. The same bytes for the
same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hetpeer.peer.limits.amounts import bytes_text
from hetpeer.peer.watching.svg_shapes import FAINT, INK, LINE, arrow, document, rect, short, text
from hetpeer.stages.planning.swarms.pipeline_cuts import PlannedPipeline, PlannedStage
from hetpeer.stages.planning.swarms.plan_inputs import StepDemand
from hetpeer.stages.planning.swarms.swarm_plan import SwarmPlan

BOX, SPARED, WAITED_FOR = "#f6f8fa", "#eaeef2", "#cf222e"
COMPUTING, SENDING = "#0969da", "#bf8700"
MARGIN, TITLE, LEFT = 24, 92, 176
WIDTH, HEIGHT, ROW, GAP = 132, 62, 92, 58
"""Pixels of a box, from one row to the next, and between two boxes for what crosses."""


def plan_picture(
    plan: SwarmPlan,
    stages: Sequence[Sequence[PlannedStage]],
    names: Sequence[str],
    spared: Sequence[str],
    work: StepDemand,
) -> str:
    """The SVG document. `stages` are those of each pipeline of `plan`, `names` those of all devices."""
    longest = max(len(row) for row in stages)
    width = max(2 * MARGIN + LEFT + longest * (WIDTH + GAP) - GAP, 560)
    height = TITLE + ROW * len(stages) + (40 if spared else 0) + MARGIN
    body = [*_title(plan, work)]
    for number, row in enumerate(stages):
        pipeline, share = plan.pipelines[number], plan.shares[number]
        body += _pipeline(pipeline, share, row, names, work, TITLE + ROW * number, plan.bottleneck[1])
    if spared:
        line = short(", ".join(spared), int(width - LEFT) // 7)
        body.append(text(MARGIN, height - MARGIN, f"spared: {line}", fill=FAINT))
    return document(width, height, body)


def _title(plan: SwarmPlan, work: StepDemand) -> Iterator[str]:
    """Title line, figures and legend."""
    what, sums = ("step", "add up the gradients") if work.averaging is None else ("batch", "average")
    beside = " beside them" if work.staleness else ""
    yield text(MARGIN, 32, f"A {what} takes {plan.total_s:.3g} s", size=16, weight="bold")
    parts = f"{plan.pipeline_s:.3g} s for the pipelines, {plan.sync_s:.3g} s to {sums}{beside}"
    yield text(MARGIN, 52, parts, fill=FAINT)
    for place, (colour, word) in enumerate(((COMPUTING, "computing"), (SENDING, "sending"))):
        x = MARGIN + 96 * place
        yield rect(x, 63, 10, 10, fill=colour, stroke="none", radius=2)
        yield text(x + 16, 72, word, fill=FAINT)
    yield text(MARGIN + 184, 72, "of the time from one microbatch to the next", fill=FAINT)


def _pipeline(
    pipeline: PlannedPipeline,
    share: int,
    stages: Sequence[PlannedStage],
    names: Sequence[str],
    work: StepDemand,
    top: float,
    waited_for: int,
) -> Iterator[str]:
    """A row of boxes, one for each stage, with arrows between them."""
    yield text(MARGIN, top + 24, f"{share} microbatch{'' if share == 1 else 'es'}", size=13, weight="bold")
    yield text(MARGIN, top + 42, f"one in {pipeline.period:.3g} s", fill=FAINT)
    lefts = [MARGIN + LEFT + (WIDTH + GAP) * place for place in range(len(stages))]
    for stage, left in zip(stages, lefts, strict=True):
        yield from _box(stage, names[stage.device], left, top, pipeline.period, stage.device == waited_for)
    middle = top + HEIGHT / 2
    for (one, other), left in zip(pairwise(stages), lefts, strict=False):
        nbytes = bytes_text(work.crossing[one.end])
        begin, end = left + WIDTH, left + WIDTH + GAP
        hint = f"{nbytes} from {names[one.device]} to {names[other.device]}, and as many back"
        yield arrow([(begin + 2, middle), (end - 2, middle)], hint)
        yield text((begin + end) / 2, middle - 6, nbytes, fill=FAINT, anchor="middle", size=10)


def _box(
    stage: PlannedStage, name: str, left: float, top: float, period: float, waited_for: bool
) -> Iterator[str]:
    """Box of a stage; bars for the shares of the period that it computes and sends."""
    times = f"computes {stage.computing:.3g} s, sends {stage.sending:.3g} s"
    hint = f"{name}: {times}, holds {bytes_text(stage.memory)}"
    stroke = WAITED_FOR if waited_for else LINE
    yield rect(left, top, WIDTH, HEIGHT, fill=BOX, stroke=stroke, radius=6, hint=hint)
    yield text(left + 8, top + 17, short(name, 18), fill=INK, weight="bold")
    last = stage.end - 1
    blocks = f"block {last}" if last == stage.begin else f"blocks {stage.begin}-{last}"
    yield text(left + 8, top + 32, f"{blocks}, {bytes_text(stage.memory)}", fill=FAINT, size=10)
    for line, (seconds, colour) in enumerate(((stage.computing, COMPUTING), (stage.sending, SENDING))):
        y, room = top + 40 + 9 * line, WIDTH - 16
        yield rect(left + 8, y, room, 6, fill=SPARED, stroke="none", radius=3)
        busy = room * min(seconds / period, 1.0)
        if busy >= 1:
            yield rect(left + 8, y, busy, 6, fill=colour, stroke="none", radius=3, hint=f"{seconds:.3g} s")
