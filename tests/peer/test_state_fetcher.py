"""What a volunteer's daemon, which has no torch, sees by itself of a graph that is no good.

The worker's part is in tests/swarm/test_bad_input.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetpeer.dht.base.errors import ExitCode, LocalError, ProtocolError
from hetpeer.peer.preparation.state_fetcher import prepare_block
from hetpeer.stages.block.offload import Offload


class Files:
    """Of a run whose graphs are these bytes."""

    def __init__(self, graph: bytes) -> None:
        self.run = SimpleNamespace(manifest=SimpleNamespace(training=SimpleNamespace(groups=())))
        self._graph = graph

    async def graph(self, _block: int) -> bytes:
        return self._graph


async def test_a_graph_that_cannot_be_read_ends_it_before_a_worker_sees_it() -> None:
    files: Any = Files(b"\x80")
    worker: Any = None
    with pytest.raises(LocalError, match="HP-RUN-025: the graph of block 3 of this run is refused") as caught:
        await prepare_block(worker, files, 3, Offload.NONE, spills=True)
    assert caught.value.exit_code == ExitCode.VERSION
    assert isinstance(caught.value.__cause__, ProtocolError)
    assert caught.value.why == caught.value.__cause__.what
