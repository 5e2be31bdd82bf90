"""Follows a run's training curve and scores of its checkpoints; shows them and hands them to logs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hetpeer.bootstrap.log.record_log import in_use, read_log
from hetpeer.bootstrap.results.scores import Scores
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.metrics_file import MetricsFile
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.peer.process.console import say
from hetpeer.peer.watching.curve_reader import CurveChange, CurveReader, PlacedPoint

LOOK_S = 1.0


class CurveLog(Protocol):
    """Something that the curve is written to."""

    def add(self, change: CurveChange) -> None:
        """Write a change of the curve."""

    def close(self) -> None:
        """Write what is left, and end."""


async def follow(run: RunDirectory, logs: Sequence[CurveLog], scores: Scores | None = None) -> None:
    """Follow the curve to its last evaluation; with `scores` also each checkpoint, to the last one.

    Cancelled, it waits for the batch that is being scored. Raises the errors of `Scores.look` and of `logs`.
    """
    curve = asyncio.ensure_future(_follow_curve(run, logs))
    parts = [curve] if scores is None else [curve, asyncio.ensure_future(_score(run, logs, scores, curve))]
    try:
        await asyncio.gather(*parts)
    finally:
        if scores is not None:
            scores.stop()
        for part in parts:
            part.cancel()


async def _follow_curve(run: RunDirectory, logs: Sequence[CurveLog]) -> None:
    """Write and show changes of the curve until the last evaluation of the run is in it."""
    if not in_use(run.log_path):
        MetricsFile(run, list(read_log(run.log_path)), SystemClock().wall).follow()
        say(f"nobody serves this run now: hetpeer bootstrap {run.path} does")
    reader = CurveReader(run.metrics_path, grouped=run.manifest.averaging is not None)
    with contextlib.closing(reader):
        while True:
            last: PlacedPoint | None = None
            for change in reader.look():
                _add(change, logs)
                for point in change.points:
                    last = point
                    if not point.is_step:
                        say(_line(point))
            if last is not None and last.is_step:
                say(_line(last))
            if last is not None and _is_the_end(last, run):
                return
            await asyncio.sleep(LOOK_S)


async def _score(
    run: RunDirectory, logs: Sequence[CurveLog], scores: Scores, curve: asyncio.Future[None]
) -> None:
    """Write and show scores: earlier ones, then one of each new checkpoint.

    Ends with that of the trained model, or when the curve has ended and nobody serves the run.
    """
    for kept in scores.points:
        _show(kept, logs)
    while scores.newest < run.manifest.training.steps:
        is_over = curve.done() and not in_use(run.log_path)  # asked first: its last checkpoint is seen below
        point = await asyncio.to_thread(scores.look)
        if point is not None:
            _show(point, logs)
        elif is_over:
            return
        else:
            await asyncio.sleep(LOOK_S)


def _show(score: Mapping[str, Any], logs: Sequence[CurveLog]) -> None:
    point = PlacedPoint(int(score["step"]), score)
    _add(CurveChange([point]), logs)
    say(_line(point))


def _add(change: CurveChange, logs: Sequence[CurveLog]) -> None:
    for log in logs:
        log.add(change)


def _is_the_end(point: PlacedPoint, run: RunDirectory) -> bool:
    """Whether `point` is the evaluation of the trained model."""
    return not point.is_step and point.fields.get("batch") == run.manifest.training.steps


def _line(point: PlacedPoint) -> str:
    """A point in words."""
    fields = point.fields
    if "scores" in fields:
        named = (f"{name} {value:.4g}" for name, value in fields["scores"].items())
        return "  ".join((f"step {point.x}", *named))
    if not point.is_step:
        perplexity = f"  perplexity {fields['perplexity']:,.2f}" if "perplexity" in fields else ""
        accuracy = f"  accuracy {fields['accuracy']:.2%}" if "accuracy" in fields else ""
        return f"step {point.x}  held-out loss {fields['loss']:.4f}{perplexity}{accuracy}"
    speeds = {"tokens_per_second": "tokens/s", "samples_per_second": "samples/s"}
    speed = "".join(f"  {fields[name]:,.0f} {unit}" for name, unit in speeds.items() if name in fields)
    groups = "".join(f", {name} {norm:.3g}" for name, norm in fields.get("group_norms", {}).items())
    return (
        f"step {point.x}  loss {fields['loss']:.4f}  gradient norm {fields['norm']:.3g}{groups}  "
        f"learning rate {fields['learning_rate']:.3g}{speed}"
    )
