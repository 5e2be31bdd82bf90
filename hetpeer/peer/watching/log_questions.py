"""Questions to reliable peers about the run's log: credit, moves, departures, plan and curves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

from hetpeer.bootstrap.log import credit_ranking, departure_counts, plan_news
from hetpeer.bootstrap.log import moves as log_moves
from hetpeer.bootstrap.log.departure_counts import DepartureCounts
from hetpeer.bootstrap.log.loss_curves import MAX_BYTES, Curves
from hetpeer.bootstrap.log.moves import Move
from hetpeer.bootstrap.log.plan_news import PlanNews
from hetpeer.bootstrap.storage.file_service import Answer, fetch
from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.node.node import Node

ANSWER_S = 4.0
ALL_S = 6.0
"""Seconds for one answer, and for all tries: a status does not wait longer for lost reliable peers."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class FromLog:
    """Asks through `node`. A reliable peer asks itself: `answers` is what it serves to others."""

    def __init__(self, node: Node, answers: Mapping[str, Answer] = MappingProxyType({})) -> None:
        self._node = node
        self._answers = answers

    async def ranking(self, reliable: Iterable[str], peer: str = "") -> credit_ranking.Ranking | None:
        """The ranking by credit, with the credit of `peer`, from the first of `reliable` that answers; None
        if none does.

        Never raises.
        """
        return await self._first(reliable, "credit", peer, credit_ranking.MAX_BYTES, credit_ranking.decode)

    async def moves(self, reliable: Iterable[str]) -> tuple[Move, ...] | None:
        """The newest moves of blocks, asked for in the same way."""
        return await self._first(reliable, "moves", "", log_moves.MAX_BYTES, log_moves.decode)

    async def departures(self, reliable: Iterable[str]) -> DepartureCounts | None:
        """How often peers have left the run, asked for in the same way."""
        limit, decode = departure_counts.MAX_BYTES, departure_counts.decode
        return await self._first(reliable, "departures", "", limit, decode)

    async def plan(self, reliable: Iterable[str]) -> PlanNews | None:
        """The last plan that was given and what came of it, asked for in the same way; None: no plan."""
        return await self._first(reliable, "plan", "", plan_news.MAX_BYTES, plan_news.decode)

    async def curves(self, reliable: Iterable[str]) -> Curves | None:
        """The loss curves, asked for in the same way."""
        return await self._first(reliable, "curves", "", MAX_BYTES, Curves.decode)

    async def _first(
        self,
        reliable: Iterable[str],
        kind: str,
        about: str,
        limit: int,
        decode: Callable[[bytes | bytearray, str], T],
    ) -> T | None:
        """Answer of the first reliable peer that gives one within ALL_S; a reliable peer asks itself."""
        if kind in self._answers:
            with contextlib.suppress(RemoteError):
                return decode(self._answers[kind](about), self._node.peer_id)
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ALL_S):
                for asked in reliable:
                    try:
                        name = f"{kind}/{about}" if about else kind
                        data, _ = await fetch(self._node, asked, name, limit, ANSWER_S)
                        return decode(data, asked)
                    except RemoteError as error:
                        _log.debug("no %s from %s: %s", kind, asked, error)
        return None
