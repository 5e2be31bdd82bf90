"""The training curve as TensorBoard's event files. Only this module imports tensorboard, which is an extra.

One event file holds the whole curve: it is written anew at each start, so no point is in it twice. After a
roll-back the file says from which step on earlier points are void, which TensorBoard heeds.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.bootstrap.samples.record import not_installed
from hetpeer.peer.watching.curve_reader import CurveChange

FILE_VERSION = "brain.Event:2"


class TensorboardLog:
    """The event file of run `name`, `run_id`, in the folder `logs / name`, which TensorBoard shows as a run.

    Raises `LocalError` HP-SYS-006 without the package, HP-DISK-001 or HP-DISK-002 if it cannot be written.
    """

    def __init__(self, logs: Path, name: str, run_id: str) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise not_installed("writing event files", "tensorboard", "tensorboard") from error
        self._event: Any = event_pb2.Event
        self._begun: Any = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._summary: Any = summary_pb2.Summary
        folder, ours = logs / name, f"hetpeer-{run_id[:8]}"
        begun = f"{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / f"events.out.tfevents.{begun}.{ours}"
        with disk_errors(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            for earlier in folder.glob(f"events.out.tfevents.*.{ours}"):
                earlier.unlink()
            self._file = self.path.open("wb")
            self._writer: Any = RecordWriter(self._file)
            self._write(file_version=FILE_VERSION)
            self._write(step=0, session_log=self._begun)
            self._file.flush()

    def add(self, change: CurveChange) -> None:
        """Write a change of the curve. Raises `LocalError` HP-DISK-002."""
        with disk_errors(self.path):
            if change.void_from is not None:
                self._write(step=change.void_from, session_log=self._begun)
            for point in change.points:
                values = [
                    self._summary.Value(tag=tag, simple_value=number) for tag, number in point.scalars.items()
                ]
                self._write(point.fields.get("time"), step=point.x, summary=self._summary(value=values))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with disk_errors(self.path):
            self._file.close()

    def _write(self, at: float | None = None, **fields: Any) -> None:
        """Write an event of the time `at`, in seconds since 1970; None: now."""
        event = self._event(wall_time=time.time() if at is None else at, **fields)
        self._writer.write(event.SerializeToString())
