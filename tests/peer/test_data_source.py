"""Data at a volunteer: what its ids need is fetched from whoever has it, in time; what is missing is
waited for.
"""

import asyncio
import math
import shutil
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import uvloop

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import StepId
from hetpeer.averaging.member.tensor_heads import ActivationHead
from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.bootstrap.storage.file_service import PROTOCOL, FileService, ServedRunFiles
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.peer.daemon.presence import no_state
from hetpeer.peer.preparation import data_source
from hetpeer.peer.preparation.data_source import DataGate, DataSource
from hetpeer.peer.preparation.disk_room import Room, taken
from hetpeer.peer.preparation.state_fetcher import RunFiles
from hetpeer.peer.process.home import Home
from hetpeer.stages.data import array_shards
from hetpeer.stages.graph.block_spec import TensorSpec
from hetpeer.stages.pipeline.routes import Hop
from tests.bootstrap.engine import DIGITS

LINE = m.TermView(term=1, view=0)


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Images in shards of seven; a step of 48 in six microbatches touches seven shards or more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_shards, "SHARD_BYTES", 7 * 264)
        training = TrainingSettings(steps=20, batch_size=48, microbatch_size=8, eval_microbatches=2)
        return create_run(
            tmp_path_factory.mktemp("author") / "run",
            model=f"{DIGITS}:build",
            loss=f"{DIGITS}:loss",
            data=[f"{DIGITS}:data"],
            training=training,
            stages=[1],
        )


class Nodes:
    """Nodes on loopback for all tests of this file, each with its p2pd, on the product's loop."""

    def __init__(self, folder: Path, runner: asyncio.Runner) -> None:
        self.runner = runner
        self._folder = folder
        self._nodes: dict[str, Node] = {}

    async def node(self, name: str) -> Node:
        """The node `name`, which knows those that were there before it."""
        if name not in self._nodes:
            known = tuple(parse_address(node.addresses()[0]) for node in self._nodes.values())
            config = NodeConfig(peers=known)
            self._nodes[name] = await Node.start(config, Identity.create(self._folder / f"{name}.key"))
        return self._nodes[name]

    async def close(self) -> None:
        for node in self._nodes.values():
            await node.close()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        nodes = Nodes(tmp_path_factory.mktemp("nodes"), runner)
        yield nodes
        runner.run(nodes.close())


class Peers:
    """Nodes that serve a run's files, and one volunteer that has none of them."""

    def __init__(self, author: RunDirectory, folder: Path, nodes: Nodes) -> None:
        self.author = author
        self.folder = folder
        self.nodes = nodes
        self.tasks = TaskSet()
        self.room = math.inf

    async def serving(self, name: str) -> tuple[Node, RunDirectory]:
        """A node that serves its own copy of the run."""
        run = RunDirectory(self.folder / name, self.author.signed)
        shutil.copytree(self.author.path, run.path)
        node = await self.nodes.node(name)
        service = FileService(ServedRunFiles(run, MembershipConfig(run.signed, run.path), no_state))
        if PROTOCOL in node.listener.handlers:  # of an earlier test
            node.listener.serve(PROTOCOL, service.handle)
        else:
            await node.serve(PROTOCOL, service.handle)
        return node, run

    async def volunteer(
        self, *peers: Node, volunteers: tuple[Node, ...] = (), room: float = math.inf
    ) -> tuple[DataSource, Path]:
        """A source that may ask `peers` and `volunteers`, and the folder that it fills with no more than
        `room` bytes.
        """
        self.room = room
        node = await self.nodes.node("volunteer")
        run = Home(self.folder / "home").run(self.author.signed)
        files = RunFiles(
            node,
            run,
            MembershipConfig(run.signed, run.path),
            [peer.peer_id for peer in peers],
            Room(run.path.parent, run.run_id, lambda: self.room),
        )
        files.volunteers = tuple(peer.peer_id for peer in (node, *volunteers))
        specs = [self.author.block_spec(block) for block in run.manifest.blocks]
        return DataSource(files, specs, self.tasks), run.data


Test = Callable[[Peers], Coroutine[Any, Any, None]]


def among_peers(test: Test) -> Callable[[RunDirectory, Path, Nodes], None]:
    """Run `test` on the loop of the nodes."""

    @wraps(test, assigned=("__name__", "__doc__", "__module__"))
    def run(author: RunDirectory, tmp_path: Path, nodes: Nodes) -> None:
        async def main() -> None:
            peers = Peers(author, tmp_path, nodes)
            try:
                async with asyncio.timeout(200):
                    await test(peers)
            finally:
                await peers.tasks.close()

        nodes.runner.run(main())

    del run.__wrapped__
    return run


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@among_peers
async def test_only_what_an_id_needs_is_fetched(peers: Peers) -> None:
    bootstrap, _ = await peers.serving("bootstrap")
    source, data = await peers.volunteer(bootstrap)
    plan = peers.author.manifest.data_plan
    assert not source.is_ready(3, 2)
    await source.make_ready(3, 2)
    assert source.is_ready(3, 2)
    assert names(data) == {shard.name for shard in plan.shards(3, 2)}
    theirs, ours = peers.author.batches().microbatch(3, 2), source.microbatch(3, 2)
    assert {name: array.tobytes() for name, array in ours.items()} == {
        name: array.tobytes() for name, array in theirs.items()
    }
    held_out = plan.evaluation.start
    await source.make_ready(0, held_out)
    assert source.is_ready(5, held_out)  # the same at every step
    assert len(source.microbatch(5, held_out)["label"]) == 8


@among_peers
async def test_shards_come_from_volunteers_too_and_damaged_ones_from_nobody(peers: Peers) -> None:
    bootstrap, poor = await peers.serving("bootstrap")
    liar, damaged = await peers.serving("liar")
    honest, _ = await peers.serving("honest")
    plan = peers.author.manifest.data_plan
    for shard in plan.shards(0, 0):
        (poor.data / shard.name).unlink()
        (damaged.data / shard.name).write_bytes(bytes(shard.bytes))
    source, data = await peers.volunteer(bootstrap, volunteers=(liar, honest))
    await source.make_ready(0, 0)
    assert source.is_ready(0, 0)

    (shard, *_) = plan.shards(0, 0)
    again = DataSource(source._files, [], peers.tasks)  # as after a restart, with a file that broke meanwhile
    (data / shard.name).write_bytes(bytes(shard.bytes))
    assert not again.is_ready(0, 0)
    await again.make_ready(0, 0)
    assert len(again.microbatch(0, 0)["label"]) == 8


@among_peers
async def test_the_next_steps_shards_come_before_they_are_needed(peers: Peers) -> None:
    """Those of the ids that were here in the last step, as far as the room goes; not the others'."""
    bootstrap, _ = await peers.serving("bootstrap")
    source, data = await peers.volunteer(bootstrap)
    plan = peers.author.manifest.data_plan
    source.begun(4)
    source.note_id(4, 1)
    source.note_id(4, plan.evaluation.start)
    source.begun(5)
    expected = {shard.name for step in range(6, 20) for shard in plan.shards(step, 1)}
    await until(lambda: all(source.is_ready(step, 1) for step in range(6, 20)))
    assert names(data) == expected

    with pytest.MonkeyPatch.context() as patch:
        near = plan.shards(7, 0)
        patch.setattr(data_source, "AHEAD_BYTES", sum(shard.bytes for shard in near))
        source.note_id(5, 0)
        source.begun(6)
        assert source._ahead is not None
        await source._ahead
        assert names(data) == expected | {shard.name for shard in near}


@among_peers
async def test_what_finds_no_room_ends_it_once_a_microbatch_needs_it_and_not_before(peers: Peers) -> None:
    bootstrap, _ = await peers.serving("bootstrap")
    source, data = await peers.volunteer(bootstrap)
    for number in range(6):
        source.note_id(0, number)
        await source.make_ready(0, number)
    before, peers.room = names(data), taken(data.parent.parent)
    source.begun(0)
    assert source._ahead is not None
    await source._ahead
    assert source._soon
    assert names(data) == before, "what the ids at hand need stays"
    peers.room = 0.0
    with pytest.raises(LocalError, match="HP-DISK-005"):
        await source.make_ready(1, 0)


@among_peers
async def test_shards_that_nobody_needs_here_any_more_make_room(peers: Peers) -> None:
    """A volunteer trains on more data than it has room for, and fetches again what it gave up."""
    bootstrap, _ = await peers.serving("bootstrap")
    source, data = await peers.volunteer(bootstrap)
    theirs, runs = peers.author.batches(), data.parent.parent

    def needed(step: int) -> int:
        shards = {shard for number in (0, 1) for shard in source._plan.shards(step, number)}
        return sum(shard.bytes for shard in shards | source._held_out())

    peers.room = taken(runs) + max(map(needed, range(1, 20)))  # what no step and the next one need together
    given_up = set[str]()
    for step in range(1, 20):
        source.begun(step)
        for number in (0, 1):
            source.note_id(step, number)
            before = names(data)
            await source.make_ready(step, number)
            given_up |= before - names(data)
            ours = source.microbatch(step, number)["label"]
            assert ours.tobytes() == theirs.microbatch(step, number)["label"].tobytes()
            assert taken(runs) <= peers.room
    assert len(given_up) > 3 * len(names(data))
    assert not all(source.is_ready(0, number) for number in range(6)), "it knows what is gone"


@among_peers
async def test_a_place_without_data_needs_no_shard_and_whoever_made_the_run_gives_none_up(
    peers: Peers,
) -> None:
    bootstrap, _ = await peers.serving("bootstrap")
    source, data = await peers.volunteer(bootstrap)
    source.note_id(0, 0)
    await source.make_ready(0, 0)
    source.close()
    room, runs = source._files.room, data.parent.parent
    peers.room = taken(runs)
    key = data.parent / "owner.key"
    key.touch()
    with pytest.raises(LocalError, match="HP-DISK-005"):
        async with room.for_file(1):
            pass
    key.unlink()
    before = names(data)
    async with room.for_file(1):
        assert len(names(data)) == len(before) - 1, "no more than is needed"


@among_peers
async def test_what_is_certain_is_brought_before_the_first_step(peers: Peers) -> None:
    """Few shards hold all of a step: then whoever computes its microbatches needs them."""
    bootstrap, _ = await peers.serving("bootstrap")
    source, data = await peers.volunteer(bootstrap)
    await source.warm_up(0)
    assert names(data) == set()  # seven shards or more: it depends on the ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_source, "FEW_SHARDS", 10)
        await source.warm_up(0)
    plan = peers.author.manifest.data_plan
    held_out = {shard.name for number in plan.evaluation for shard in plan.shards(0, number)}
    assert names(data) == {shard.name for shard in plan.shards_of_step(0)} | held_out


def begin(step: int, *ids: int) -> m.Begin:
    return m.Begin(
        line=LINE,
        step=step,
        batch=step,
        microbatches=6,
        roster={"me": (0, 4)},
        incarnations={"me": 1},
        tasks=tuple(m.Task(id=number, route=(Hop("me", 0, 4),)) for number in ids),
    )


@among_peers
async def test_tasks_wait_at_the_gate_for_their_data_and_for_nobody_elses(peers: Peers) -> None:
    bootstrap, _ = await peers.serving("bootstrap")
    source, _ = await peers.volunteer(bootstrap)
    gate = DataGate(source, peers.tasks)
    await source.make_ready(1, 0)
    heard: list[m.Message] = []
    gate.message(begin(1, 0, 3), heard.append)
    assert [task.id for task in heard[0].tasks] == [0]
    assert heard[0].model_copy(update={"tasks": begin(1, 0, 3).tasks}) == begin(1, 0, 3)
    await until(lambda: len(heard) == 2)
    assert heard[1] == m.Reroute(line=LINE, step=1, tasks=begin(1, 3).tasks)
    assert source.is_ready(1, 3)

    passed: list[int] = []
    head = ActivationHead(
        line=LINE, step=1, incarnation=1, id=4, batch=1, route=(Hop("me", 1, 4),), attempt=0
    )
    gate.activation(head, lambda: passed.append(4))
    assert passed == []
    await until(lambda: passed == [4])
    gate.activation(head, lambda: passed.append(4))
    assert passed == [4, 4]

    in_the_middle = head.model_copy(update={"route": (Hop("me", 1, 2),), "id": 5})
    gate.activation(in_the_middle, lambda: passed.append(5))
    stranger = head.model_copy(update={"id": 10**6})
    gate.activation(stranger, lambda: passed.append(6))
    assert passed == [4, 4, 5, 6]  # nothing to wait for


@among_peers
async def test_nothing_of_an_ended_step_comes_through(peers: Peers) -> None:
    bootstrap, _ = await peers.serving("bootstrap")
    source, _ = await peers.volunteer(bootstrap)
    gate = DataGate(source, peers.tasks)
    heard: list[m.Message] = []
    gate.message(begin(1, 0), heard.append)
    gate.message(begin(2, 0), heard.append)
    gate.end_step(StepId(LINE, 1))
    await until(lambda: len(heard) == 3)
    await source.make_ready(1, 0)
    await asyncio.sleep(0)
    assert [(message.kind, message.step) for message in heard] == [("begin", 1), ("begin", 2), ("reroute", 2)]

    gate.message(begin(3, 0), heard.append)
    gate.close()
    await source.make_ready(3, 0)
    await asyncio.sleep(0)
    assert len(heard) == 4


@among_peers
async def test_a_shard_that_nobody_has_is_asked_for_again_and_then_given_up(peers: Peers) -> None:
    bootstrap, run = await peers.serving("bootstrap")
    (shard, *_) = peers.author.manifest.data_plan.shards(0, 0)
    content = (run.data / shard.name).read_bytes()
    (run.data / shard.name).unlink()
    source, data = await peers.volunteer(bootstrap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_source, "RETRY_S", 0.05)
        await source.make_ready(0, 0)
        assert not source.is_ready(0, 0)
        with pytest.raises(LocalError, match=shard.name) as caught:
            source.microbatch(0, 0)
        assert (caught.value.code, caught.value.exit_code) == ("HP-DATA-006", ExitCode.NETWORK)
        patch.setattr(data_source, "RETRY_S", 1.0)  # it does not give up while this process is held up
        waiting = asyncio.ensure_future(source.make_ready(0, 0))
        await asyncio.sleep(0.05)
        (run.data / shard.name).write_bytes(content)
        await waiting
    assert len(source.microbatch(0, 0)["label"]) == 8

    (data / shard.name).unlink()
    source._batches._open.cache_clear()
    with pytest.raises(LocalError, match="HP-DATA-006"):
        source.microbatch(0, 0)
    await source.make_ready(0, 0)  # what was lost is fetched anew
    assert len(source.microbatch(0, 0)["label"]) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"nobody": TensorSpec(shape=(8,), dtype="int64")},
        {"label": TensorSpec(shape=(8,), dtype="int32")},
        {"image": TensorSpec(shape=(8, 1, 8, 9), dtype="float32")},
    ],
)
def test_a_block_that_wants_other_inputs_is_refused(
    author: RunDirectory, changes: dict[str, TensorSpec], tmp_path: Path
) -> None:
    spec = author.block_spec(author.manifest.blocks[0])
    files = RunFiles(None, author, MembershipConfig(author.signed, author.path), (), None)
    with pytest.raises(LocalError, match=f"{next(iter(changes))!r}") as caught:
        DataSource(files, [replace(spec, data=changes)], TaskSet())
    assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-007", ExitCode.VERSION)
