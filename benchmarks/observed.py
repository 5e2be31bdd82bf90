"""hetpeer with a window: the same command line, and every few seconds a line of what piles up inside.

`python -m benchmarks.observed join …` appends JSON to $HETPEER_HOME/inside.jsonl: unacknowledged frames in outboxes,
channels, bytes used in the arena, asyncio tasks. It looks through Python's own list of objects, so the product has no
code for it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import time
from pathlib import Path

from hetpeer.dht.channel import Channel
from hetpeer.peer.cli.main import run
from hetpeer.stages.execution.arena import Arena

PERIOD_S = 5.0


def look() -> dict[str, float]:
    """Figures of this moment; another thread runs meanwhile, so they are not of one instant."""
    objects = gc.get_objects()
    channels = [one for one in objects if isinstance(one, Channel)]
    return {
        "time": time.monotonic(),
        "outbox": sum(len(channel.outbox) for channel in channels),
        "channels": len(channels),
        "arena_used": sum(one.used for one in objects if isinstance(one, Arena)),
        "tasks": sum(isinstance(one, asyncio.Task) for one in objects),
        "objects": len(objects),
    }


def look_for_ever(path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        while True:
            threading.Event().wait(PERIOD_S)
            file.write(json.dumps(look()) + "\n")
            file.flush()


if __name__ == "__main__":
    window = Path(os.environ["HETPEER_HOME"]) / "inside.jsonl"
    window.parent.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=look_for_ever, args=(window,), daemon=True).start()
    run()
