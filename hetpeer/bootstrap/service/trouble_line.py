"""One line when a trouble begins and one when it is over, however often it is tried in between."""

from __future__ import annotations

import logging

from hetpeer.dht.base.errors import HetpeerError


class TroubleLine:
    """A trouble that is tried again and again. `over` is the line that says that it has ended."""

    def __init__(self, log: logging.Logger, over: str) -> None:
        self._log = log
        self._over = over
        self._code = ""
        """Code of the error that lasts; empty: there is none."""

    def lasts(self, error: HetpeerError, line: str) -> None:
        """Warn with `line` unless the last try had the same kind of error."""
        self._log.log(logging.DEBUG if error.code == self._code else logging.WARNING, "%s", line)
        self._code = error.code

    def ended(self) -> None:
        """Say that the trouble is over, if there was one."""
        if self._code:
            self._code = ""
            self._log.warning("%s", self._over)
