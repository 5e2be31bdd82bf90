"""A place among devices: the fastest division that fits, and how much surely does."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.pipeline.division import Division, divide, sure_room


def test_blocks_go_by_speed_as_far_as_memory_allows():
    even = [2, 2, 2, 2], [1.0] * 4
    assert divide(3, *even, rooms=[8, 8], speeds=[1.0, 1.0]) == Division(3, (5, 7))
    assert divide(3, *even, rooms=[8, 8], speeds=[3.0, 1.0]) == Division(3, (6, 7))
    assert divide(3, *even, rooms=[2, 8], speeds=[3.0, 1.0]) == Division(3, (4, 7)), "the fast one is small"
    assert divide(3, *even, rooms=[4, 3], speeds=[1.0, 1.0]) is None
    assert divide(3, *even, rooms=[8], speeds=[1.0]) == Division(3, (7,))
    assert divide(0, [9, 1], [1.0, 1.0], rooms=[5, 9, 5], speeds=[1.0] * 3) == Division(0, (0, 1, 2))


Devices = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=4)
Blocks = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)


@given(Blocks, Devices)
def test_no_division_that_fits_is_faster(blocks, devices):
    sizes, flops = [size for size, _ in blocks], [float(work) for _, work in blocks]
    rooms, speeds = [room for room, _ in devices], [float(speed) for _, speed in devices]

    def seconds(ends):
        cuts = [*itertools.pairwise((0, *ends))]
        if any(sum(sizes[a:b]) > room for (a, b), room in zip(cuts, rooms, strict=True)):
            return None
        return max(sum(flops[a:b]) / speed for (a, b), speed in zip(cuts, speeds, strict=True))

    cuts = itertools.combinations_with_replacement(range(len(blocks) + 1), len(devices) - 1)
    found = [seconds((*ends, len(blocks))) for ends in cuts]
    possible = [one for one in found if one is not None]
    best = divide(0, sizes, flops, rooms, speeds)
    if best is None:
        assert not possible
    else:
        assert seconds(best.ends) == min(possible)


@given(Blocks, Devices)
def test_what_surely_fits_does(blocks, devices):
    """Any blocks of so many bytes in all, none larger than the largest."""
    sizes, rooms = [size for size, _ in blocks], [room for room, _ in devices]
    if max(sizes) <= max(rooms) and sum(sizes) <= sure_room(rooms, max(sizes)):
        assert divide(0, sizes, [1.0] * len(sizes), rooms, [1.0] * len(rooms)) is not None
