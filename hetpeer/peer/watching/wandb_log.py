"""The training curve in Weights & Biases. Only this module imports wandb, which is an extra.

W&B takes no point back. So after a roll-back or a restart only points are sent that are newer than all that
were sent; an exact run that repeats steps gets the same losses again. Offline nothing is sent: each start
writes the whole curve and removes what earlier ones have written, unless wandb has sent it since.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetpeer.bootstrap.run.durable_files import atomic_write
from hetpeer.bootstrap.samples.record import not_installed
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.watching.curve_reader import CurveChange, PlacedPoint

STEP = "step"
"""Name of the x axis: the number of updates."""


class WandbLog:
    """A run of W&B's `project`, continued at each start; `folder` gets its files and what was sent.

    `WANDB_MODE=offline` keeps it on this machine, for `wandb sync`. Raises `LocalError`: HP-SYS-006 without
    the package, HP-SYS-008 if W&B refuses, HP-DISK-001 or HP-DISK-002 if the folder cannot be written.
    """

    def __init__(self, project: str, folder: Path, name: str, run_id: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise not_installed("writing to W&B", "wandb", "wandb") from error
        self._sent_path = folder / "wandb.json"
        self._sent: dict[str, int] = {}
        """Kind of point → x of the last one sent."""
        if self._sent_path.is_file():
            self._sent = json.loads(self._sent_path.read_bytes())
        try:
            self._run: Any = wandb.init(
                project=project,
                name=name,
                id=run_id[:16],
                resume="allow",
                dir=str(folder),
                config=dict(config),
                settings=wandb.Settings(console="off"),
            )
        except Exception as error:  # wandb raises many kinds, some of them of its own packages
            raise _refused(error) from error
        if self._run.offline and not self._was_sent(Path(self._run.dir).parent):
            self._sent = {}
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def _was_sent(self, ours: Path) -> bool:
        """Whether an earlier offline start was sent by `wandb sync`; removes those that were not."""
        sent = False
        for earlier in ours.parent.glob(f"offline-run-*-{self._run.id}"):
            if earlier != ours and any(earlier.glob("*.synced")):
                sent = True
            elif earlier != ours:
                shutil.rmtree(earlier, ignore_errors=True)
        return sent

    def add(self, change: CurveChange) -> None:
        """Send the points that are newer than what was sent. Raises `LocalError` HP-DISK-*."""
        new = [point for point in change.points if point.x > self._sent.get(_kind(point), -1)]
        for point in new:
            self._run.log({STEP: point.x, **point.scalars})
            self._sent[_kind(point)] = point.x
        if new:
            atomic_write(self._sent_path, json.dumps(self._sent).encode())

    def close(self) -> None:
        """Send what is left, and end."""
        self._run.finish()


def _kind(point: PlacedPoint) -> str:
    return str(point.fields["kind"])


def _refused(error: Exception) -> LocalError:
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    return LocalError(
        "HP-SYS-008",
        "W&B does not take the run",
        why=why,
        fix="run wandb login, or set WANDB_MODE=offline and later use wandb sync",
        exit_code=ExitCode.NETWORK,
    )
