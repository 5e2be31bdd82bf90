"""A run's loss curve as an SVG file: no plotting library, the same bytes for the same run.

Step numbers run from left to right, losses (nats per token) upwards, linear. Losses that are not finite are
left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from hetpeer.peer.watching.svg_shapes import FAINT, INK, text

Point = tuple[float, float]
"""(step, loss)."""

WIDTH, HEIGHT = 880, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 56, 52
GRID = "#e6e9ec"
SWARM, REFERENCE, EVALUATION, KILL, ROLLBACK = "#0969da", "#f0a02f", "#8250df", "#cf222e", "#1a7f37"
_text = partial(text, fill=FAINT, anchor="middle", size=12)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotMark:
    """A vertical line at `step`: a volunteer's kill, or a roll-back (then `rollback` is true)."""

    step: float
    text: str
    rollback: bool = False


def loss_curve(
    training: Sequence[Point],
    *,
    evaluations: Sequence[Point] = (),
    reference: Sequence[Point] = (),
    marks: Sequence[PlotMark] = (),
    title: str = "",
) -> str:
    """The SVG document. `reference` is what one machine computed alone, drawn beneath the swarm's curve."""
    curves = [
        [point for point in curve if math.isfinite(point[1])] for curve in (training, evaluations, reference)
    ]
    points = [point for curve in curves for point in curve] or [(0.0, 0.0)]
    steps = _ticks(0, max(x for x, _ in points), 10)
    losses = _ticks(min(y for _, y in points), max(y for _, y in points), 6)
    right, low, high = max(steps[-1], *(x for x, _ in points)), losses[0], losses[-1]

    def place(x: float, y: float) -> Point:
        across, up = x / (right or 1), (y - low) / ((high - low) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            ' font-family="system-ui, sans-serif">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 24, title, fill=INK, anchor="start", size=15),
    ]
    for y in losses:
        _, at = place(0, y)
        parts.append(_line(LEFT, at, WIDTH - RIGHT, at, GRID))
        parts.append(_text(LEFT - 8, at + 4, f"{y:g}", anchor="end"))
    for x in steps:
        at, _ = place(x, low)
        parts.append(_line(at, HEIGHT - BOTTOM, at, HEIGHT - BOTTOM + 5, FAINT))
        parts.append(_text(at, HEIGHT - BOTTOM + 20, f"{x:g}"))
    parts.append(_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, FAINT))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "step"))
    parts.append(
        _text(18, HEIGHT / 2, "loss (nats per token)", more=f' transform="rotate(-90 18 {HEIGHT / 2:g})"')
    )
    for mark in marks:
        at, _ = place(mark.step, low)
        colour = ROLLBACK if mark.rollback else KILL
        parts.append(_line(at, TOP, at, HEIGHT - BOTTOM, colour, ' stroke-dasharray="4 3"'))
        before = at > WIDTH * 0.75  # no room for the text behind the line
        parts.append(
            _text(
                at - 5 if before else at + 5,
                TOP + (24 if mark.rollback else 10),
                mark.text,
                fill=colour,
                anchor="end" if before else "start",
            )
        )
    trained, evaluated, alone = ([place(*point) for point in curve] for curve in curves)
    parts.append(_curve(alone, REFERENCE, 6))
    parts.append(_curve(trained, SWARM, 2))
    parts += [
        f'<circle cx="{x:.2f}" cy="{y:.2f}" r="4" fill="#ffffff" stroke="{EVALUATION}" stroke-width="2"/>'
        for x, y in evaluated
    ]
    parts += _legend(
        [("swarm", SWARM, trained), ("one machine", REFERENCE, alone), ("held-out", EVALUATION, evaluated)]
    )
    return "\n".join([*(part for part in parts if part), "</svg>"]) + "\n"


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers, about `count` of them, that enclose [low, high]."""
    rough = max(high - low, 1e-9) / count
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / unit + 1e-9), math.ceil(high / unit - 1e-9)
    return [round(n * unit, 10) for n in range(first, max(last, first + 1) + 1)]


def _legend(entries: Sequence[tuple[str, str, Sequence[Point]]]) -> Iterator[str]:
    at = float(WIDTH - RIGHT)
    for name, colour, points in reversed(entries):
        if points:
            yield _text(at, 24, name, anchor="end")
            at -= 7 * len(name) + 10
            yield f'<rect x="{at - 14:g}" y="17" width="14" height="5" rx="2" fill="{colour}"/>'
            at -= 34


def _curve(points: Sequence[Point], colour: str, width: float) -> str:
    path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    joined = f'fill="none" stroke="{colour}" stroke-width="{width:g}" stroke-linejoin="round"'
    return f'<polyline points="{path}" {joined}/>' if points else ""


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, extra: str = "") -> str:
    return f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{colour}"{extra}/>'
