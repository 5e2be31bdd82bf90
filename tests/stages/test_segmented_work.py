"""Work in segments: which device gets which part when."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.ipc.block_commands import Backward, ClearStep, DropSlot, Forward, Unload
from hetpeer.stages.ipc.segmented_work import SegmentedWork
from hetpeer.stages.ipc.worker_messages import CommandFailed, Done
from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.pipeline.division import Division

FAILED = CommandFailed(code="HP-NUM-001", what="not finite", why="", fix="")


class Devices:
    """Devices that answer when they are told to; `asked`: (device, command) in the order of asking."""

    def __init__(self, count=2):
        self.asked = []
        self._answers = []
        self.work = SegmentedWork(count, self._ask)

    def _ask(self, device, command):
        self.asked.append((device, command))
        self._answers.append(asyncio.get_running_loop().create_future())
        return self._answers[-1]

    async def answer(self, which, result=None):
        """Answer the command that was asked as number `which`."""
        self._answers[which].set_result(result or Done())
        await asyncio.sleep(0)

    @property
    def names(self):
        return [f"{command.kind} {command.task} at {device}" for device, command in self.asked]


def forward(task, begin=0, end=2, step=3):
    versions = (step,) * (end - begin)
    return Forward(
        step=step, versions=versions, task=task, begin=begin, end=end, batch=1, draw=Draw(0, 0, 0, 1)
    )


def backward(task, *fold, step=3, slot=0):
    return Backward(step=step, task=task, slot=slot, fold=fold)


async def test_a_part_begins_when_the_one_before_is_done_and_others_run_beside_it():
    devices = Devices()
    first = devices.work.post([(0, forward("a", 0, 1)), (1, forward("a", 1, 2))])
    devices.work.post([(0, forward("b", 0, 1)), (1, forward("b", 1, 2))])
    assert devices.names == ["forward a at 0", "forward b at 0"]
    await devices.answer(0)
    assert devices.names[2:] == ["forward a at 1"]
    await devices.answer(2)
    assert await first == [Done(), Done()]


async def test_gradients_are_added_in_the_order_of_posting_whatever_their_blocks():
    devices = Devices()
    devices.work.post([(1, backward("a", 1)), (0, backward("a", 0))])
    devices.work.post([(0, backward("b", 0))])
    assert devices.names == ["backward a at 1"], "b waits for a at device 0"
    await devices.answer(0)
    assert devices.names[1:] == ["backward a at 0", "backward b at 0"]


async def test_a_part_that_fails_ends_its_work_and_holds_up_no_other():
    devices = Devices()
    broken = devices.work.post([(1, backward("a", 1)), (0, backward("a", 0))])
    devices.work.post([(0, backward("b", 0))])
    await devices.answer(0, FAILED)
    assert await broken == [FAILED]
    assert devices.names[1:] == ["backward b at 0"]


async def test_the_death_of_a_worker_is_the_answer():
    devices = Devices()
    work = devices.work.post([(1, backward("a", 1)), (0, backward("a", 0))])
    devices._answers[0].set_exception(RuntimeError("dead"))
    with pytest.raises(RuntimeError, match="dead"):
        await work


async def test_a_dropped_slot_does_not_come_back_with_a_part_to_come():
    devices = Devices()
    devices.work.post([(1, backward("a", 1, 2)), (0, backward("a", 0))])
    devices.work.post([(1, backward("b", 1, 2, slot=1)), (0, backward("b", 0, slot=1))])
    for block in (0, 1, 2):
        devices.work.heed(DropSlot(step=3, block=block, slot=0))
    await devices.answer(0)
    await devices.answer(1)
    folds = {f"{command.task} at {device}": command.fold for device, command in devices.asked}
    assert folds == {"a at 1": (1, 2), "b at 1": (1, 2), "a at 0": (), "b at 0": (0,)}


@pytest.mark.parametrize("over", [ClearStep(step=3), Unload(block=1)])
async def test_what_is_over_is_called_off_once_its_running_part_is_done(over):
    devices = Devices()
    work = devices.work.post([(0, forward("a", 0, 1)), (1, forward("a", 1, 2))])
    later = devices.work.post([(0, forward("b", 0, 1, step=4)), (1, forward("b", 2, 3, step=4))])
    devices.work.heed(over)
    assert not work.done(), "its tensors are in use"
    await devices.answer(0)
    assert [type(one) for one in await work] == [Done, CommandFailed]
    await devices.answer(1)
    assert devices.names == ["forward a at 0", "forward b at 0", "forward b at 1"]
    assert not later.done()


@given(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 5), st.integers(1, 6))
def test_segments_are_the_blocks_of_each_device(cuts, begin, count):
    """Every block once, in order, and all of a segment at one device."""
    end = min(begin + count, 6)
    division = Division(0, (*sorted(cuts), 6))
    segments = division.segments(begin, max(end, begin + 1))
    blocks = [block for first, last in segments for block in range(first, last)]
    assert blocks == list(range(begin, max(end, begin + 1)))
    at = [{division.device_of(block) for block in range(*segment)} for segment in segments]
    assert all(len(devices) == 1 for devices in at)
    assert [min(devices) for devices in at] == sorted({division.device_of(block) for block in blocks})
