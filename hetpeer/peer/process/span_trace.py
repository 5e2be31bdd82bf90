"""Trace of a volunteer: one line of JSON for each span of time, written as it happens.

Off by default. `hetpeer trace` merges the files of a swarm (perfetto.py). A trace is not evidence: a line
that cannot be written is dropped, and a full disk ends the trace, not the volunteer.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import IO, Any

from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.dht.base.runtime import Clock

SUFFIX = ".trace.jsonl"
MAX_BYTES = 1 << 28
"""Bytes after which a file is not continued: some hundred thousand microbatches."""

_log = logging.getLogger(__name__)


class Trace:
    """The trace of one process. Without a `path`, spans are dropped."""

    def __init__(self, clock: Clock, path: Path | None = None, **who: str) -> None:
        """`who` names the process in the picture. Raises `LocalError` HP-DISK-002."""
        self._clock = clock
        self._file: IO[str] | None = None
        self.on = path is not None
        """Whether spans are written."""
        self._bytes = 0
        if path is not None:
            with disk_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("w", buffering=1)
            # Spans are told by a clock that does not jump; files of several machines meet on the wall's.
            self._write({**who, "wall": clock.wall() - clock.monotonic()})

    def now(self) -> float:
        """Seconds, for `span`."""
        return self._clock.monotonic()

    def span(self, lane: str, name: str, began: float, ended: float | None = None, **more: Any) -> None:
        """`name` took place in `lane` from `began` until `ended`, or until now."""
        if self._file is not None:
            self._write({"lane": lane, "name": name, "from": began, "to": ended or self.now(), **more})

    def close(self) -> None:
        """Nothing is written any more. Idempotent."""
        file, self._file, self.on = self._file, None, False
        if file is not None:
            try:
                file.close()
            except OSError as error:
                _log.warning("the trace ends early: %s", error.strerror)

    def _write(self, line: dict[str, Any]) -> None:
        """Append a line; a full file or an error ends the trace."""
        assert self._file is not None
        text = json.dumps(line, separators=(",", ":"))
        self._bytes += len(text) + 1
        if self._bytes > MAX_BYTES:
            _log.warning("the trace ends: %s is full", self._file.name)
            self.close()
            return
        try:
            self._file.write(text + "\n")
        except OSError as error:
            _log.warning("the trace ends: %s", error.strerror)
            self.close()
