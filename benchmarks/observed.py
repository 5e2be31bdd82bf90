"""hetpeer with a window: the same command line, and every few seconds a line of what piles up inside.

`python -m benchmarks.observed join …` appends JSON to $HETPEER_HOME/inside.jsonl: unacknowledged frames in
outboxes, channels, bytes used in the arena, asyncio tasks, blocks of Python's allocator. The window takes
note of each channel and arena as it is made, so the product has no code for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import weakref
from pathlib import Path
from typing import Any, TypeVar

from hetpeer.dht.channels.channel import Channel
from hetpeer.peer.cli.main import run
from hetpeer.stages.ipc.arena import Arena

PERIOD_S = 5.0
T = TypeVar("T")


def noted(kind: type[T]) -> weakref.WeakSet[T]:
    """All living instances of `kind` that are made from now on."""
    living: weakref.WeakSet[T] = weakref.WeakSet()
    construct = kind.__init__

    def construct_and_note(self: T, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named)
        living.add(self)

    kind.__init__ = construct_and_note  # type: ignore[method-assign,assignment]
    return living


class Window:
    """Opens with the first arena, on the loop that made it: each line is of one instant."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._channels, self._arenas = noted(Channel), noted(Arena)
        construct = Arena.__init__

        def construct_and_open(arena: Arena, *arguments: Any) -> None:
            construct(arena, *arguments)
            asyncio.get_running_loop().call_later(PERIOD_S, self._look)

        Arena.__init__ = construct_and_open  # type: ignore[method-assign,assignment]

    def _look(self) -> None:
        line = {
            "time": time.monotonic(),
            "outbox": sum(len(channel.outbox) for channel in self._channels),
            "channels": len(self._channels),
            "arena_used": sum(arena.used for arena in self._arenas),
            "tasks": len(asyncio.all_tasks()),
            "blocks": sys.getallocatedblocks(),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        asyncio.get_running_loop().call_later(PERIOD_S, self._look)


if __name__ == "__main__":
    home = Path(os.environ["HETPEER_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    window = Window(home / "inside.jsonl")
    run()
