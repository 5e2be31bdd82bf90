"""Which states of blocks a volunteer gives away: those of its line of history alone."""

import asyncio
from pathlib import Path

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import SaveState
from hetpeer.averaging.member.member_life import Phase
from hetpeer.dht.base.file_pieces import read
from hetpeer.peer.training.held_states import HeldStates
from hetpeer.peer.transport.exchange import PassingState
from hetpeer.stages.ipc.nameless_file import ALIGNMENT, DiskShare, NamelessFile
from tests.averaging.rig import LINE, STEP, member_in

VERSION = STEP.number
ROOM = 10


class Worker:
    """Dumps what it is said to hold."""

    def __init__(self, folder: Path, limit: int = 1 << 20) -> None:
        self.content = b"first"
        self.exchange = NamelessFile(folder, DiskShare(limit))

    def dump(self, block: int, room: int):
        state, content = PassingState(self.exchange), self.content
        state.begin(room)

        async def written() -> int:
            state.write(0, content)
            return len(content)

        return state, written()


async def given(states: HeldStates, version: int = VERSION, block: int = 0, cluster: int = 0) -> bytes | None:
    async with states.find(cluster, version, block) as served:
        return served and bytes(read(served.data, 0, served.data.nbytes))


async def test_a_copy_of_another_line_is_not_given_for_one_of_this(tmp_path):
    member, worker = member_in(Phase.READY), Worker(tmp_path)
    states = HeldStates(member, asyncio.Event())
    states.use(worker, {0: ROOM, 1: ROOM})
    await asyncio.gather(*states.snapshot(SaveState(LINE, VERSION, {0: "digest 0"})))
    worker.content = b"second"
    assert await given(states) == b"first", "as it was when it was asked for"
    member.life.position.line = m.TermView(term=LINE.term, view=LINE.view + 1)
    assert await given(states) == b"second"
    await asyncio.gather(*states.snapshot(SaveState(member.line, VERSION, {1: "digest 1"})))
    member.life.position.line = LINE
    worker.content = b"third"
    assert await given(states) == b"third"


async def test_of_another_cluster_or_version_it_has_nothing(tmp_path):
    states = HeldStates(member_in(Phase.READY), asyncio.Event())
    states.use(Worker(tmp_path), {0: ROOM, 1: ROOM})
    assert await given(states, cluster=1) is None
    assert await given(states, VERSION + 2) is None


async def test_a_copy_takes_room_as_long_as_somebody_reads_it(tmp_path):
    worker = Worker(tmp_path)
    states = HeldStates(member_in(Phase.READY), asyncio.Event())
    states.use(worker, {0: ROOM, 1: ROOM})
    order = SaveState(LINE, VERSION, {0: "digest 0"})
    await asyncio.gather(*states.snapshot(order))
    one = worker.exchange.used
    assert one > 0
    await asyncio.gather(*states.snapshot(order))
    assert worker.exchange.used == one, "the second copy is in the place of the first"
    async with states.find(0, VERSION, 0) as served:
        states.use(None, {})
        assert bytes(read(served.data, 0, 5)) == b"first", "its reader is not done"
        assert worker.exchange.used == one
    assert worker.exchange.used == 0
    assert worker.exchange.file.nbytes == 0, "the disk has everything back"


def known(states: HeldStates, *versions: int) -> list[int]:
    """Versions of block 0 of which there are copies with the right digests."""
    found = {version: states.own(version, 0, f"digest {version}") for version in versions}
    for place in found.values():
        if place is not None:
            place[0].drop()
    return [version for version, place in found.items() if place is not None]


async def test_copies_of_the_last_complete_checkpoint_stay_until_a_later_one_is_complete(tmp_path):
    worker = Worker(tmp_path)
    states = HeldStates(member_in(Phase.READY), asyncio.Event())
    states.use(worker, {0: ROOM})
    for version, stored, left in [(3, None, [3]), (6, 3, [3, 6]), (9, 3, [3, 9]), (12, 9, [9, 12])]:
        order = SaveState(LINE, version, {0: f"digest {version}"}, stored)
        await asyncio.gather(*states.snapshot(order))
        assert known(states, 3, 6, 9, 12) == left
    assert states.give_way()
    assert known(states, 3, 6, 9, 12) == [12]
    assert not states.give_way()


async def test_they_give_way_where_the_disk_has_little_room(tmp_path):
    """Its limit is three copies: there is no room for two beside those of the last checkpoint."""
    worker = Worker(tmp_path, limit=3 * ALIGNMENT)
    states = HeldStates(member_in(Phase.READY), asyncio.Event())
    states.use(worker, {0: ALIGNMENT})
    for version, stored, left in [(3, None, [3]), (6, 3, [3, 6]), (9, 6, [9])]:
        await asyncio.gather(*states.snapshot(SaveState(LINE, version, {0: f"digest {version}"}, stored)))
        assert known(states, 3, 6, 9) == left


async def test_without_room_for_it_a_copy_is_not_made_and_not_given(tmp_path, caplog):
    worker = Worker(tmp_path, limit=ROOM - 1)
    states = HeldStates(member_in(Phase.READY), asyncio.Event())
    states.use(worker, {0: ROOM, 1: ROOM})
    assert states.snapshot(SaveState(LINE, VERSION, {0: "digest 0"})) == []
    assert [record.message.split(":")[1] for record in caplog.records] == [" HP-DISK-010"]
    assert await given(states) is None
