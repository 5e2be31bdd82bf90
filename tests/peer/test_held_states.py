"""Which states a volunteer gives away: those of its line of history alone."""

import asyncio

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import SaveState
from hetpeer.averaging.member.member import Phase
from hetpeer.peer.training.held_states import HeldStates
from tests.averaging.rig import LINE, STEP, member_in

VERSION = STEP.number


class Worker:
    """Dumps what it is said to hold."""

    content = b"first"

    async def dump(self, block: int, room: int) -> bytes:
        return self.content


async def test_a_copy_of_another_line_is_not_given_for_one_of_this():
    member, worker = member_in(Phase.READY), Worker()
    states = HeldStates(member, asyncio.Event())
    states.use(worker, {0: 10, 1: 10})
    await asyncio.gather(*states.snapshot(SaveState(LINE, VERSION, {0: "digest 0"})))
    worker.content = b"second"
    assert (await states.find(0, VERSION, 0)).data == b"first", "as it was when it was asked for"
    member.position.line = m.TermView(term=LINE.term, view=LINE.view + 1)
    assert (await states.find(0, VERSION, 0)).data == b"second"
    await asyncio.gather(*states.snapshot(SaveState(member.line, VERSION, {1: "digest 1"})))
    member.position.line = LINE
    worker.content = b"third"
    assert (await states.find(0, VERSION, 0)).data == b"third"


async def test_of_another_cluster_or_version_it_has_nothing():
    states = HeldStates(member_in(Phase.READY), asyncio.Event())
    states.use(Worker(), {0: 10, 1: 10})
    assert await states.find(1, VERSION, 0) is None
    assert await states.find(0, VERSION + 2, 0) is None
