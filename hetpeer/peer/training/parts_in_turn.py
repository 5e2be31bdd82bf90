"""Parts of a reduce, exported to their reducers in turn: never is a copy of a whole slot in the arena.

A part is exported when an earlier one to the same reducer is not needed any more: it has arrived there, or
was added up here. Reducers are served independently and each in the order of its shards, which is the same at
all holders. So the first shard that a reducer has not added up is under way from every holder, and nobody
waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from hetpeer.averaging import effects as e

Work = Coroutine[Any, Any, None]
AT_ONCE = 8
"""Parts to one reducer in the arena at a time: 4 MiB of shards of the usual length."""


class _Line(NamedTuple):
    """Parts to one reducer under one plan."""

    step: e.StepId
    plan: int
    reducer: str


class PartsInTurn:
    """Parts that wait for their turn.

    `export(step, part, free)` posts a part's export; `free` is called when its memory is free again. `start`
    runs what `export` returns.
    """

    def __init__(
        self,
        export: Callable[[e.StepId, e.SendPart, Callable[[], None]], Work],
        start: Callable[[Work], object],
    ) -> None:
        self._export = export
        self._start = start
        self._waiting: dict[_Line, deque[e.SendPart]] = {}
        self._under_way: dict[_Line, int] = {}

    def send(self, step: e.StepId, part: e.SendPart) -> None:
        """Export `part` in its turn. Parts of older plans of the step are not exported any more."""
        line = _Line(step, part.shard.plan, part.shard.reducer)
        if line not in self._waiting:
            self._drop(lambda other: other.step == step and other.plan < line.plan)
            self._waiting[line], self._under_way[line] = deque(), 0
        self._waiting[line].append(part)
        self._go_on(line)

    def _go_on(self, line: _Line) -> None:
        if self._waiting[line] and self._under_way[line] < AT_ONCE:
            self._under_way[line] += 1
            part = self._waiting[line].popleft()
            self._start(self._export(line.step, part, partial(self._freed, line)))

    def _freed(self, line: _Line) -> None:
        if line in self._waiting:
            self._under_way[line] -= 1
            self._start(self._next(line))  # not now: whoever frees memory is in the middle of something

    async def _next(self, line: _Line) -> None:
        if line in self._waiting:
            self._go_on(line)

    def slot_changed(self, step: e.StepId, block: int, slot: int) -> None:
        """Export no more of `slot` at `block`: it is not what the plan names any more."""
        for line, parts in self._waiting.items():
            if line.step == step:
                left = [part for part in parts if (part.shard.block, part.slot) != (block, slot)]
                parts.clear()
                parts.extend(left)

    def end_step(self, step: e.StepId) -> None:
        """Forget the parts of `step`."""
        self._drop(lambda line: line.step == step)

    def _drop(self, over: Callable[[_Line], bool]) -> None:
        for line in [line for line in self._waiting if over(line)]:
            del self._waiting[line], self._under_way[line]
