"""No byte of the arena is given to somebody else while it is in use, and none stays taken when nobody uses
it.
"""

import random
from functools import partial
from pathlib import Path

from hetpeer.averaging.effects import StepId
from hetpeer.averaging.messages import TermView
from hetpeer.peer.transport.spill_file import SpillFile
from hetpeer.peer.transport.tensor_store import TensorStore
from hetpeer.stages.ipc.arena import Arena
from hetpeer.stages.ipc.nameless_file import DiskShare

STEPS = [StepId(TermView(term=1, view=0), number) for number in range(3)]


def test_a_pinned_tensor_outlives_its_step() -> None:
    arena = Arena(1 << 20)
    store = TensorStore(arena, SpillFile(Path(), DiskShare(0)))
    tensor = store.new(STEPS[0], 1000)
    pinned = store.pin([tensor])
    store.end_step(STEPS[0])
    assert tensor.released
    assert arena.used > 0
    store.unpin(pinned)
    assert arena.used == 0
    arena.close()


def test_a_tensor_on_its_way_to_a_peer_outlives_its_step() -> None:
    """Or what is sent would be bytes of whoever gets the memory next."""
    for once in (False, True):
        arena = Arena(1 << 20)
        store = TensorStore(arena, SpillFile(Path(), DiskShare(0)))
        tensor = store.new(STEPS[0], 1000)
        tensor.once = once
        arrived = [store.leaves(tensor), store.leaves(tensor)]
        pinned = store.pin([tensor])
        arrived[0]()
        store.end_step(STEPS[0])
        store.unpin(pinned)
        assert arena.used > 0
        arrived[1]()
        assert arena.used == 0
        arena.close()


def test_tensors_that_land_in_one_vector_are_parts_of_it() -> None:
    """What they were in is free at once, the vector with its last owner."""
    arena = Arena(1 << 20)
    store = TensorStore(arena, SpillFile(Path(), DiskShare(0)))
    room = store.new(STEPS[0], 1 << 13)
    parts = [store.put(STEPS[0], memoryview(bytes([number]) * (1 << 12))) for number in (1, 2)]
    others = store.share(parts[0])  # somebody else has the same bytes
    free: list[int] = []
    for number, part in enumerate(parts):
        store.lend(part, partial(free.append, number))
        store.land(part, room.extent, number << 12)
    assert free == [1], "the first was not ours alone"
    store.release(room)
    assert store.view(parts[1]).tobytes() == bytes([2]) * (1 << 12)
    whole = store.whole(parts[1])
    assert store.view(whole).tobytes() == bytes([1]) * (1 << 12) + bytes([2]) * (1 << 12)
    again = store.share(parts[0])
    store.release_all([others, *parts])
    assert free == [1, 0]
    used = arena.used
    store.release(whole)
    assert arena.used == used >= 1 << 13, "a share of a part keeps all of it"
    store.end_step(STEPS[0])
    assert again.released
    assert arena.used == 0
    arena.close()


def test_a_sum_goes_with_its_encoded_copy() -> None:
    arena = Arena(1 << 20)
    store = TensorStore(arena, SpillFile(Path(), DiskShare(0)))
    total = store.new(STEPS[0], 1000)
    total.written = store.new(STEPS[0], 500)
    sent = store.share(total.written)
    store.release(total)
    assert arena.used > 0
    store.release(sent)
    assert arena.used == 0
    arena.close()


def test_a_shared_tensor_is_freed_with_its_last_owner() -> None:
    arena = Arena(1 << 20)
    store = TensorStore(arena, SpillFile(Path(), DiskShare(0)))
    tensor = store.new(STEPS[0], 1000)
    shared = store.share(tensor)
    store.release(tensor)
    store.release(tensor)
    assert arena.used > 0
    store.release(shared)
    assert arena.used == 0
    arena.close()


def test_nothing_is_left_whatever_the_order() -> None:
    """Also of steps that ended before their last tensor came."""
    arena = Arena(1 << 20)
    store = TensorStore(arena, SpillFile(Path(), DiskShare(0)))
    chance = random.Random(5)
    for _ in range(300):
        tensors = [store.new(chance.choice(STEPS), chance.randrange(2000)) for _ in range(6)]
        tensors += [store.share(chance.choice(tensors)) for _ in range(2)]
        pinned = store.pin(chance.sample(tensors, 3))
        actions = [partial(store.release, tensor) for tensor in tensors]
        actions += [partial(store.end_step, step) for step in chance.sample(STEPS, 2)]
        actions += [partial(store.unpin, [tensor]) for tensor in pinned]
        actions += [store.leaves(tensor) for tensor in chance.choices(tensors, k=3)]
        chance.shuffle(actions)
        for act in actions:
            act()
        assert arena.used == 0
        assert not store._steps
    arena.close()
