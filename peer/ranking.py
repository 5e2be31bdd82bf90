"""The run's ranking by credit, asked for at the reliable peers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from hetpeer.bootstrap.ranking import MAX_BYTES, Ranking, decode
from hetpeer.bootstrap.serving import fetch
from hetpeer.dht.errors import RemoteError
from hetpeer.dht.node import Node

ANSWER_S = 4.0
ALL_S = 6.0
"""Whoever waits for a status does not wait longer than this for a reliable peer that is gone."""

_log = logging.getLogger(__name__)


async def fetch_ranking(node: Node, reliable: Iterable[str], peer: str = "") -> Ranking | None:
    """As the first of `reliable` says that answers, with what `peer` has. None: nobody does. Never raises."""
    name = f"credit/{peer}" if peer else "credit"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ALL_S):
            for asked in reliable:
                try:
                    data, _ = await fetch(node, asked, name, MAX_BYTES, ANSWER_S)
                    return decode(data, asked)
                except RemoteError as error:
                    _log.debug("no credit from %s: %s", asked, error)
    return None
