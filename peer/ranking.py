"""The run's ranking by credit, asked for at the reliable peers."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from hetpeer.bootstrap.ranking import MAX_BYTES, Ranking, decode
from hetpeer.bootstrap.serving import fetch
from hetpeer.dht.errors import RemoteError
from hetpeer.dht.node import Node

ANSWER_S = 4.0

_log = logging.getLogger(__name__)


async def fetch_ranking(node: Node, reliable: Iterable[str], peer: str = "") -> Ranking | None:
    """As the first of `reliable` says that answers, with what `peer` has. None: nobody does. Never raises."""
    for asked in reliable:
        try:
            data, _ = await fetch(node, asked, f"credit/{peer}" if peer else "credit", MAX_BYTES, ANSWER_S)
            return decode(data, asked)
        except RemoteError as error:
            _log.debug("no credit from %s: %s", asked, error)
    return None
