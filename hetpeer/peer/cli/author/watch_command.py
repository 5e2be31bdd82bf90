"""`hetpeer watch`: follow a run's training curve on its machine. The work is done in peer/watching."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from hetpeer.peer.cli.options import RunDir, run_loop
from hetpeer.peer.process.console import say

if TYPE_CHECKING:
    from hetpeer.bootstrap.run.run_directory import RunDirectory
    from hetpeer.peer.watching.curve_reader import CurveChange, PlacedPoint

LOOK_S = 1.0


class CurveLog(Protocol):
    """Something that the curve is written to."""

    def add(self, change: CurveChange) -> None:
        """Write a change of the curve."""

    def close(self) -> None:
        """Write what is left, and end."""


def watch(
    directory: RunDir,
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="LOGDIR", help="Write event files for tensorboard --logdir LOGDIR."),
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option(
            metavar="PROJECT",
            help="Write to a project of Weights & Biases; with WANDB_MODE=offline to files for wandb sync.",
        ),
    ] = None,
) -> None:
    """Follow a run's training curve.

    On the machine of the run directory, beside hetpeer bootstrap. It ends with the run, and may be ended and
    started again at any time.
    """
    from hetpeer.bootstrap.run.run_directory import RunDirectory

    run = RunDirectory.open(directory)
    with contextlib.ExitStack() as opened:
        logs = _logs(run, tensorboard, wandb)
        for log in logs:
            opened.callback(log.close)
        run_loop(_follow(run, logs))


def _logs(run: RunDirectory, tensorboard: Path | None, wandb: str | None) -> list[CurveLog]:
    """Targets that the curve is written to."""
    name, found = run.manifest.name, list[CurveLog]()
    if tensorboard is not None:
        from hetpeer.peer.watching.tensorboard_log import TensorboardLog

        found.append(TensorboardLog(tensorboard, name, run.run_id))
        print(f"tensorboard --logdir {tensorboard}")
    if wandb is not None:
        from hetpeer.peer.watching.wandb_log import WandbLog

        config = {"run": run.run_id, **run.manifest.training.model_dump(mode="json")}
        found.append(WandbLog(wandb, run.path, name, run.run_id, config))
    return found


async def _follow(run: RunDirectory, logs: Sequence[CurveLog]) -> None:
    """Write and show changes of the curve until the last evaluation of the run is in it."""
    import asyncio

    from hetpeer.bootstrap.log.record_log import in_use, read_log
    from hetpeer.bootstrap.storage.metrics_file import MetricsFile
    from hetpeer.dht.base.runtime import SystemClock
    from hetpeer.peer.watching.curve_reader import CurveReader

    if not in_use(run.log_path):
        MetricsFile(run, list(read_log(run.log_path)), SystemClock().wall).follow()
        say(f"nobody serves this run now: hetpeer bootstrap {run.path} does")
    reader = CurveReader(run.metrics_path, grouped=run.manifest.averaging is not None)
    with contextlib.closing(reader):
        while True:
            last: PlacedPoint | None = None
            for change in reader.look():
                for log in logs:
                    log.add(change)
                for point in change.points:
                    last = point
                    if not point.is_step:
                        say(_line(point))
            if last is not None and last.is_step:
                say(_line(last))
            if last is not None and _is_the_end(last, run):
                return
            await asyncio.sleep(LOOK_S)


def _is_the_end(point: PlacedPoint, run: RunDirectory) -> bool:
    """Whether `point` is the evaluation of the trained model."""
    return not point.is_step and point.fields.get("batch") == run.manifest.training.steps


def _line(point: PlacedPoint) -> str:
    """A point in words."""
    fields = point.fields
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
