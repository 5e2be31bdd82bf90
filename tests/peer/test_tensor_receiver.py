"""Tensors that come over real channels: what a sender does wrong is its own fault, and what we lack room
for is not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import StepId
from hetpeer.averaging.member.tensor_heads import Coded, Head, ShardHead
from hetpeer.averaging.member.work_in_progress import WorkerOccupation
from hetpeer.bootstrap.run.settings import LinkSettings
from hetpeer.dht.base.errors import PeerLostError
from hetpeer.dht.base.runtime import SystemClock, TaskSet
from hetpeer.dht.channels.channel_server import MAX_LANES
from hetpeer.dht.streams.frame import encode_head
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.process.span_trace import Trace
from hetpeer.peer.training.step_driver import StepDriver
from hetpeer.peer.training.task_execution import HeldPlace
from hetpeer.peer.training.volunteer_figures import VolunteerFigures
from hetpeer.peer.transport.link_book import LinkBook
from hetpeer.peer.transport.spill_file import SpillFile
from hetpeer.peer.transport.tensor_receiver import TensorReceiver
from hetpeer.peer.transport.tensor_schema import TensorSchema
from hetpeer.peer.transport.tensor_store import Tensor, TensorStore
from hetpeer.peer.transport.uplink import SHARDS
from hetpeer.peer.transport.worker_posts import WorkerPosts
from hetpeer.stages.ipc.arena import ALIGNMENT, Arena
from hetpeer.stages.ipc.block_commands import Decode
from hetpeer.stages.ipc.nameless_file import DiskShare
from hetpeer.stages.links.codec import Codec, EncodedTensor
from hetpeer.stages.pipeline.schedule_1f1b import InFlightWindow
from hetpeer.stages.worker.bundle_codec import Decoder
from hetpeer.stages.worker.tensor_staging import Copier, Staging
from tests.bootstrap.engine import make_run
from tests.dht.loopback import Loopback
from tests.dht.test_channel import until

LINE = m.TermView(term=1, view=0)
ELEMENTS = 100
NBYTES = 4 * ELEMENTS


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> TensorSchema:
    run = make_run(Path(tmp_path_factory.mktemp("receiving")))
    return TensorSchema([run.block_spec(block) for block in run.manifest.blocks], run.manifest)


class Owner:
    """What is told of tensors."""

    def __init__(self) -> None:
        self.arrived: list[Tensor] = []

    def tensor_arrived(self, _peer: str, _head: Head, tensor: Tensor) -> None:
        self.arrived.append(tensor)

    def unread(self, *_bundle: Any) -> None: ...

    def nudged(self, *_bundle: Any) -> None: ...

    def introduced(self, *_word: Any) -> None: ...


class InProcess:
    """A compute worker that decodes, without a process."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._decoder = Decoder(Staging(arena.memory, Copier.of(torch.device("cpu"))))

    async def post(self, command: Any) -> Any:
        return self._decoder.execute(command) if isinstance(command, Decode) else None


class Member:
    """A core that keeps the parts of shards."""

    occupation = WorkerOccupation.STEP

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.work = self

    def part(self, _origin: Any, _block: int, _index: int, tensor: Tensor) -> tuple[()]:
        self.parts.append(tensor)
        return ()


class Rig:
    """Our side, and a peer's streams to it, on which it says whatever it likes."""

    def __init__(self, schema: TensorSchema) -> None:
        self.arena = Arena(8 << 20)
        self.store = TensorStore(self.arena, SpillFile(Path(), DiskShare(0)))
        self.owner = Owner()
        self.trace, self.book = Trace(SystemClock()), LinkBook(LinkSettings(reduce="int8"))
        self.receiving = TensorReceiver(self.book, self.trace, self.owner)
        self.receiving.use(schema, self.store)
        self.receiving.keep_only(frozenset({"us", "them"}))
        self.network = Loopback(self.receiving.handle, "them")

    async def open(self, key: str = "a", lane: int = 0) -> Stream:
        stream = await self.network.open("us", "tensors", timeout_s=5.0)
        await stream.send({"key": key, "lane": lane, "has": 0, "begun": False})
        assert (await stream.receive(timeout_s=5)).header == {"has": 0}
        return stream


async def heard_out(stream: Stream) -> None:
    """Listen until it breaks."""
    while True:
        await stream.receive(timeout_s=30)


@asynccontextmanager
async def rigged(schema: TensorSchema) -> AsyncIterator[Rig]:
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
    return head.model_dump()


def frame(number: int, total: int, message: dict[str, Any]) -> dict[str, Any]:
    """The head of frame `number`, with which so many bytes are spent."""
    return {"n": number, "a": 0, "s": [[SHARDS, total]], "m": message}


def working(rig: Rig, schema: TensorSchema, tasks: TaskSet) -> tuple[StepDriver, Member]:
    """What is done with all that arrives at `rig`, as far as it is decoded."""
    quiet = SimpleNamespace(
        use=rig.receiving.use, end_step=lambda _step: None, send=lambda *_: None, of_use=lambda *_: None
    )
    member, posts = Member(), WorkerPosts(InProcess(rig.arena), rig.store, rig.trace)  # type: ignore[arg-type]

    def spawn(work: Any) -> None:
        tasks.spawn(work, name="work")

    def nothing(*_: Any) -> None: ...

    parts = (member, quiet, rig.store, VolunteerFigures(), spawn, nothing, rig.trace, nothing)
    work = StepDriver(*parts)  # type: ignore[arg-type]
    window, offended = InFlightWindow(), lambda *_: None
    place = ("us", member, posts, schema, rig.book, window, None, tasks, nothing, offended)
    work.use(HeldPlace(*place))  # type: ignore[arg-type]
    rig.owner.tensor_arrived = work.arrived  # type: ignore[method-assign]
    return work, member


@pytest.mark.parametrize("ends", [False, True])
async def test_what_there_is_no_room_to_decode_for_waits_and_its_sender_is_not_to_blame(
    schema: TensorSchema, ends: bool
) -> None:
    codec, sent = Codec.of("int8"), np.linspace(-1, 1, ELEMENTS, dtype=np.float32)
    written = (EncodedTensor(ELEMENTS),)
    layout, tasks = schema.shard_layout(ELEMENTS), TaskSet()
    nbytes = layout.written(codec, written)
    scale = np.array([1 / 127], np.float32).view(np.uint16)[1:]  # a bfloat16 is the upper half
    payload = scale.tobytes() + np.round(sent * 127).astype(np.int8).tobytes()
    assert len(payload) == nbytes
    head = shard(0) | {"coded": Coded(codec="int8", written=written).model_dump()}
    async with rigged(schema) as rig:
        work, member = working(rig, schema, tasks)
        full = rig.arena.allocate(rig.arena.capacity - 4 * ALIGNMENT)
        stream = await rig.open()
        await stream.send(frame(1, nbytes + NBYTES, head), payload)
        while (await stream.receive(timeout_s=30)).header["a"] < 1:  # else it would be sent again
            pass
        assert rig.receiving._intake.held() == nbytes + NBYTES
        assert not member.parts
        if ends:
            work.end(StepId(LINE, 0))
        else:
            rig.arena.release(full)
            await until(lambda: bool(member.parts))
            got = np.frombuffer(rig.store.view(member.parts[0]), np.float32)
            assert np.allclose(got, sent, atol=0.01)
            rig.store.release(member.parts[0])
            rig.arena.allocate(rig.arena.capacity - 4 * ALIGNMENT)
        assert rig.receiving._intake.held() == 0
        assert rig.arena.capacity - rig.arena.used == 4 * ALIGNMENT
        await until(lambda: not tasks._tasks)


async def test_a_peer_has_one_links_credit_however_many_keys_it_names(schema: TensorSchema) -> None:
    """One for each lane, and each had the credit of a link."""
    async with rigged(schema) as rig:
        streams = [await rig.open(f"key {lane}", lane) for lane in range(MAX_LANES)]
        streams.append(await rig.open(f"key {MAX_LANES - 1}", 0))
        *gone, last, same = streams
        for stream in gone:
            with pytest.raises(PeerLostError):
                await heard_out(stream)
        channels = list(rig.receiving._server)
        await until(lambda: all(channel.is_up for channel in channels))
        assert {(channel.key, channel.lane) for channel in channels} == {
            (f"key {MAX_LANES - 1}", lane) for lane in (0, MAX_LANES - 1)
        }
        first, second = (channel.grant_lane for channel in channels)
        assert first is not None
        assert second is not None
        assert first.grants is second.grants
        for stream in (last, same):
            assert (await stream.receive(timeout_s=30)).header["a"] == 0


async def test_a_step_that_ends_while_a_tensor_of_it_arrives_leaves_nothing(schema: TensorSchema) -> None:
    """Neither its memory nor its credit, and nobody is told of a tensor whose memory is another's by then."""
    async with rigged(schema) as rig:
        stream = await rig.open()
        head = encode_head(frame(1, NBYTES, shard(0)), NBYTES)
        await stream._wire.write([head, bytes(NBYTES // 2)])
        await until(lambda: rig.arena.used > 0)
        rig.store.end_step(StepId(LINE, 0))
        assert rig.arena.used > 0
        await stream._wire.write([bytes(NBYTES // 2)])
        await until(lambda: rig.arena.used == 0)
        assert not rig.owner.arrived
        assert rig.arena.used == rig.receiving._intake.held() == 0
        await stream.send(frame(2, 2 * NBYTES, shard(1)), bytes(NBYTES))
        await until(lambda: len(rig.owner.arrived) == 1)
        assert rig.receiving._intake.held() == NBYTES
        rig.store.release(rig.owner.arrived[0])
        assert rig.arena.used == rig.receiving._intake.held() == 0
