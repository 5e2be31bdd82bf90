"""`hetpeer watch`: follow a run's training curve on its machine. The work is done in peer/watching."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpeer.peer.cli.options import RunDir, run_loop

if TYPE_CHECKING:
    from hetpeer.bootstrap.results.scores import Scores
    from hetpeer.bootstrap.run.run_directory import RunDirectory
    from hetpeer.peer.watching.follow_curve import CurveLog


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
    score: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE.PY:FUNCTION",
            help="Function of (model, batch) that returns scores by name. It is computed on this machine for "
            "each checkpoint, on the held-out samples.",
        ),
    ] = None,
) -> None:
    """Follow a run's training curve.

    On the machine of the run directory, beside hetpeer bootstrap. It ends with the run, and may be ended and
    started again at any time.
    """
    from hetpeer.bootstrap.run.run_directory import RunDirectory
    from hetpeer.peer.watching.follow_curve import follow

    run = RunDirectory.open(directory)
    with contextlib.ExitStack() as opened:
        scores = None if score is None else _scores(run, score)
        logs = _logs(run, tensorboard, wandb)
        for log in logs:
            opened.callback(log.close)
        run_loop(follow(run, logs, scores))


def _scores(run: RunDirectory, reference: str) -> Scores:
    """The scores of the author's function. Raises `LocalError` HP-RUN-001 for a grouped run."""
    from hetpeer.bootstrap.results.scores import Scores
    from hetpeer.dht.base.errors import ExitCode, LocalError

    if run.manifest.averaging is not None:
        raise LocalError(
            "HP-RUN-001",
            "--score has no effect in a grouped run",
            why="its checkpoints belong to no point of the curve",
            fix="leave it out, and score what hetpeer export writes",
            exit_code=ExitCode.CONFIG,
        )
    return Scores(run, reference)


def _logs(run: RunDirectory, tensorboard: Path | None, wandb: str | None) -> list[CurveLog]:
    """Targets that the curve is written to."""
    name = run.manifest.name
    found: list[CurveLog] = []
    if tensorboard is not None:
        from hetpeer.peer.watching.tensorboard_log import TensorboardLog

        found.append(TensorboardLog(tensorboard, name, run.run_id))
        print(f"tensorboard --logdir {tensorboard}")
    if wandb is not None:
        from hetpeer.peer.watching.wandb_log import WandbLog

        config = {"run": run.run_id, **run.manifest.training.model_dump(mode="json")}
        found.append(WandbLog(wandb, run.path, name, run.run_id, config))
    return found
