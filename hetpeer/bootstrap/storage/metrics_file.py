"""`metrics.jsonl` of a run directory: the training curve as a text file that grows with the log.

The file follows from the log, so nothing of it is ever lost for good. Lines are appended. After a roll-back,
a restart or a failed write the whole file is replaced at once; a reader sees another inode then.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.record_log import ROW
from hetpeer.bootstrap.run.durable_files import atomic_write_parts, disk_errors, leave_room
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.checkpoints import SPARED_BYTES
from hetpeer.bootstrap.storage.training_curve import CurvePoints, curve_of


class MetricsFile:
    """Writes `metrics.jsonl` from the log `records`, which may grow. One thread at a time calls `follow`.

    metrics = MetricsFile(run, replica.records, time.time)
    if metrics.is_behind:
        metrics.follow()

    `time` of a line is `now()`, in seconds since 1970, when it was first written; lines for records from
    before this start have the time that the old file says, or none.
    """

    def __init__(self, run: RunDirectory, records: Sequence[Record], now: Callable[[], float]) -> None:
        self.path = run.metrics_path
        self._records = records
        self._now = now
        self._points = CurvePoints(run.manifest)
        self._curve = curve_of(run.manifest, records)
        self._read = 0
        """Records in the curve."""
        self._written: int | None = None
        """Points in the file, which are the first ones of the curve; None: it may have others."""
        self._size = 0
        """Bytes of the file after the last write."""
        self._begun_at = len(records)
        """Records from before this start."""

    @property
    def is_behind(self) -> bool:
        """Whether the log has records that were not looked at, or the last write failed."""
        return self._read < len(self._records) or self._written != len(self._curve.numbers)

    def follow(self) -> None:
        """Bring the file up to the log. On an error the next call writes all of it.

        Raises `LocalError`: HP-DISK-001, HP-DISK-002 (16 MiB are left to the log), HP-LOG-001.
        """
        while row := self._records[self._read : self._read + ROW]:
            for record in row:
                if self._curve.add(self._read, record):
                    self._written = None
                self._read += 1
        if self._written is None or self._bytes() != self._size:
            self._replace()
        elif self._written < len(self._curve.numbers):
            self._append(self._written)

    def _append(self, begin: int) -> None:
        """Append the points from number `begin` on."""
        data = b"".join(self._lines(begin, {}))
        leave_room(self.path, len(data) + SPARED_BYTES)
        self._written = None  # a part may get there
        with disk_errors(self.path, len(data)), self.path.open("ab") as file:
            file.write(data)
        self._done()

    def _replace(self) -> None:
        self._written = None
        leave_room(self.path, self._bytes() + SPARED_BYTES)
        atomic_write_parts(self.path, self._lines(0, self._times()))
        self._done()

    def _done(self) -> None:
        self._size, self._written = self._bytes(), len(self._curve.numbers)

    def _bytes(self) -> int:
        """Bytes of the file; 0 without one."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def _lines(self, begin: int, known: Mapping[int, float]) -> Iterator[bytes]:
        """Lines of the points from number `begin` on; `known`: hash of a point → its time."""
        now = self._now()
        for number in self._curve.numbers[begin:]:
            point = self._points.of(self._records[number])
            at = known.get(_hash(point), now if number >= self._begun_at else None)
            stamp = {} if at is None else {"time": round(at, 3)}
            yield json.dumps({**point, **stamp}).encode() + b"\n"

    def _times(self) -> dict[int, float]:
        """Hash of each point in the file → its time."""
        found = {}
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    point = dict(json.loads(line))
                    at = float(point.pop("time"))
                    found[_hash(point)] = at
        return found


def _hash(point: Mapping[str, Any]) -> int:
    return hash(json.dumps(point))
