"""Tensors that come over real channels: what a sender does wrong is its own fault, and what we lack room for is not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import StepId
from hetpeer.averaging.heads import Head, ShardHead, encode_head
from hetpeer.bootstrap.settings import LinkSettings
from hetpeer.dht import frames
from hetpeer.dht.clock import SystemClock
from hetpeer.dht.credit import pack
from hetpeer.dht.streams import Stream
from hetpeer.peer.tracing import Trace
from hetpeer.peer.transport.linkbook import LinkBook
from hetpeer.peer.transport.pressure import SHARDS
from hetpeer.peer.transport.receiving import Receiving
from hetpeer.peer.transport.schema import Schema
from hetpeer.peer.transport.tensors import Tensor, TensorStore
from hetpeer.stages.execution.arena import Arena
from tests.bootstrap.engine import make_run
from tests.dht.loopback import Loopback
from tests.dht.test_channel import until

LINE = m.Line(term=1, view=0)
ELEMENTS = 100
NBYTES = 4 * ELEMENTS


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Schema:
    run = make_run(Path(tmp_path_factory.mktemp("receiving")))
    return Schema([run.block_spec(block) for block in run.manifest.blocks], run.manifest)


class Owner:
    """What is told of tensors."""

    def __init__(self) -> None:
        self.arrived: list[Tensor] = []

    def tensor_arrived(self, _peer: str, _head: Head, tensor: Tensor) -> None:
        self.arrived.append(tensor)

    def unread(self, *_bundle: Any) -> None: ...

    def nudged(self, *_bundle: Any) -> None: ...

    def introduced(self, *_word: Any) -> None: ...


class Rig:
    """Our side, and a peer's streams to it, on which it says whatever it likes."""

    def __init__(self, schema: Schema) -> None:
        self.arena = Arena(8 << 20)
        self.store = TensorStore(self.arena)
        self.owner = Owner()
        self.receiving = Receiving(LinkBook(LinkSettings()), Trace(SystemClock()), self.owner)
        self.receiving.use(schema, self.store)
        self.receiving.keep_only(frozenset({"us", "them"}))
        self.network = Loopback(self.receiving.handle, "them")

    async def open(self, key: str = "a", lane: int = 0) -> Stream:
        stream = await self.network.open("us", "tensors", timeout_s=5.0)
        await stream.send({"key": key, "lane": lane, "has": 0, "begun": False})
        assert (await stream.receive(timeout_s=5)).header == {"has": 0}
        return stream


@asynccontextmanager
async def rigged(schema: Schema) -> AsyncIterator[Rig]:
    rig = Rig(schema)
    try:
        yield rig
    finally:
        rig.receiving.close()
        rig.arena.close()


def shard(step: int) -> dict[str, Any]:
    head = ShardHead(
        line=LINE, step=step, incarnation=1, kind="part", plan=0, block=0, index=0, begin=0, end=ELEMENTS
    )
    return encode_head(head)


def frame(number: int, total: int, message: dict[str, Any]) -> dict[str, Any]:
    """The head of frame `number`, with which so many bytes are spent."""
    return {"n": number, "a": 0, "s": pack({SHARDS: total}), "m": message}


async def test_a_step_that_ends_while_a_tensor_of_it_arrives_leaves_nothing(schema: Schema) -> None:
    """Neither its memory nor its credit, and nobody is told of a tensor whose memory is another's by then."""
    async with rigged(schema) as rig:
        stream = await rig.open()
        head = frames.encode_head(frame(1, NBYTES, shard(0)), NBYTES)
        await stream._wire.write([head, bytes(NBYTES // 2)])
        await until(lambda: rig.arena.used > 0)
        rig.store.end_step(StepId(LINE, 0))
        assert rig.arena.used > 0
        await stream._wire.write([bytes(NBYTES // 2)])
        await until(lambda: rig.receiving.nbytes == NBYTES)
        assert not rig.owner.arrived
        assert rig.arena.used == rig.receiving._intake.held() == 0
        await stream.send(frame(2, 2 * NBYTES, shard(1)), bytes(NBYTES))
        await until(lambda: len(rig.owner.arrived) == 1)
        assert rig.receiving._intake.held() == NBYTES
        rig.store.release(rig.owner.arrived[0])
        assert rig.arena.used == rig.receiving._intake.held() == 0
