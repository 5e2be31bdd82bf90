"""One line when a trouble begins and one when it is over, however often it is tried in between."""

from __future__ import annotations

import logging

from hetpeer.dht.base.errors import HetpeerError


class TroubleLine:
    """A trouble that is tried again and again. `over` is the line that says that it has ended."""

    def __init__(self, log: logging.Logger, over: str) -> None:
        self._log = log
        self._over = over
        self.error: HetpeerError | None = None
        """The error of the last try while the trouble lasts."""

    def lasts(self, error: HetpeerError, line: str) -> None:
        """Warn with `line` unless the last try had the same kind of error."""
        known = self.error is not None and error.code == self.error.code
        self._log.log(logging.DEBUG if known else logging.WARNING, "%s", line)
        self.error = error

    def ended(self) -> None:
        """Say that the trouble is over, if there was one."""
        if self.error is not None:
            self.error = None
            self._log.warning("%s", self._over)
