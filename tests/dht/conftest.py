from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The product's loop: payload buffers take another path through asyncio's own."""
    return {"uvloop": uvloop.new_event_loop}
