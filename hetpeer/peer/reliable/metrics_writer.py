"""The task of a reliable peer that writes `metrics.jsonl` while the log grows."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from hetpeer.bootstrap.storage.metrics_file import MetricsFile
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.base.runtime import to_its_end
from hetpeer.dht.base.trouble_line import TroubleLine

LOOK_S = 0.5
AGAIN_S = 10.0
"""Seconds until a failed write is tried again."""

_log = logging.getLogger(__name__)


async def write_forever(metrics: MetricsFile, ready: asyncio.Event) -> None:
    """Bring the file up to the log twice a second, and once more when cancelled.

    It begins when the reliable peer is `ready`: before that, the peer itself may wait for room. A failed
    write stops nothing: one line says so, it is tried again, and one line says when it worked.
    """
    await ready.wait()
    failing = TroubleLine(_log, f"{metrics.path} is written again")
    try:
        while True:
            if metrics.is_behind:
                try:
                    await to_its_end(metrics.follow)
                except LocalError as error:
                    failing.lasts(error, f"the training curve is not written for now: {error.line()}")
                    await asyncio.sleep(AGAIN_S)
                else:
                    failing.ended()
            await asyncio.sleep(LOOK_S)
    finally:
        with contextlib.suppress(LocalError):
            metrics.follow()
