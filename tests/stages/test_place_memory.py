"""The memory of a place: the tables of docs/memory.md, and what holds for every demand and every offer."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.stages.block.offload import Offload
from hetpeer.stages.pipeline.place_memory import (
    CHOICES,
    HALF,
    NUMBER,
    Choice,
    Offered,
    PlaceDemand,
    Room,
    Upkeep,
    capacity,
    choose,
    kinds_of,
    room_text,
)

NONE, HOST, DISK = Offload
upkeeps = st.builds(
    Upkeep,
    kept=st.integers(0, 12),
    behind=st.integers(0, 3),
    means=st.integers(0, 1),
    in_state=st.integers(0, 5),
)
amounts = st.integers(0, 1 << 12)
numbers = st.integers(0, 1 << 8)
demands = st.builds(
    PlaceDemand,
    numbers=numbers,
    halved=numbers,
    constants=amounts,
    activations=amounts,
    recomputable=amounts,
    copies=amounts,
    upkeep=upkeeps,
).map(
    lambda demand: replace(
        demand,
        halved=min(demand.halved, demand.numbers),
        recomputable=min(demand.recomputable, demand.activations),
        copies=min(demand.copies, demand.activations),
    )
)
offers = st.builds(
    Offered,
    device=amounts,
    host=st.one_of(st.just(0), amounts),
    disk=st.one_of(st.just(0), amounts),
    kinds=st.sampled_from(sorted(CHOICES)).map(kinds_of),
)


def bytes_of(kind: Offload, apart: bool, **upkeep: int) -> tuple[int, int, int]:
    """Bytes of one parameter on the device, in main memory, in the scratch file."""
    room = Upkeep(**{"in_state": 0, **upkeep}).each(kind, apart=apart)
    return room.device, room.host, room.disk


@pytest.mark.parametrize(
    ("kind", "apart", "upkeep", "each"),
    [
        (NONE, True, {}, (24, 4, 4)),
        (HOST, True, {}, (8, 20, 8)),
        (DISK, True, {}, (8, 4, 24)),
        (NONE, False, {}, (24, 0, 8)),
        (HOST, False, {}, (24, 0, 8)),
        (DISK, False, {}, (12, 0, 20)),
        (HOST, True, {"kept": 1}, (8, 16, 8)),
        (HOST, True, {"behind": 1}, (12, 28, 12)),
        (HOST, True, {"in_state": 3}, (8, 20, 20)),
    ],
)
def test_adamw_in_float32_as_in_the_tables(kind, apart, upkeep, each) -> None:
    assert bytes_of(kind, apart, **upkeep) == each


@pytest.mark.parametrize(
    ("kind", "apart", "device"), [(HOST, True, 4), (DISK, True, 4), (NONE, True, 24), (DISK, False, 12)]
)
def test_copies_in_bfloat16_take_half(kind, apart, device) -> None:
    assert PlaceDemand(numbers=1, halved=1).room(kind, apart=apart).device == device


def test_without_offload_and_without_a_file_it_is_32_bytes() -> None:
    demand = PlaceDemand(numbers=1000, constants=7, activations=11)
    assert demand.in_one_memory == 32_000 + 18


@given(demands, st.sampled_from(Offload), st.booleans(), st.booleans())
def test_every_kind_takes_the_same_bytes_but_for_masters(demand, kind, apart, spills) -> None:
    room = demand.room(kind, apart=apart, spills=spills)
    here = demand.room(NONE, apart=apart, spills=False)
    away = apart and kind is not NONE
    masters = NUMBER * demand.numbers if away else 0
    saved = HALF * demand.upkeep.computing * demand.halved + demand.copies if away else 0
    copies = NUMBER * demand.upkeep.in_state * demand.numbers if spills or kind is DISK else 0
    assert room.total == here.total + masters - saved + copies
    assert room.device <= here.device
    assert room.host == 0 or apart


@given(demands, offers, amounts, amounts, amounts)
def test_who_offers_more_has_room_for_whatever_fitted_before(demand, offered, device, host, disk) -> None:
    more = replace(
        offered,
        device=offered.device + device,
        host=offered.host + (host if offered.apart else 0),
        disk=offered.disk + disk,
    )
    if choose(demand, offered).fits:
        assert choose(demand, more).fits
    assert choose(demand, more).missing.total <= choose(demand, offered).missing.total


@given(demands, demands, offers)
def test_a_part_of_a_place_fits_where_the_place_does(one, other, offered) -> None:
    other = replace(other, upkeep=one.upkeep)
    if choose(PlaceDemand.of_all([one, other]), offered).fits:
        assert choose(one, offered).fits


@given(demands, offers)
def test_a_choice_never_takes_more_than_is_offered_or_says_exactly_what_is_missing(demand, offered) -> None:
    choice = choose(demand, offered)
    assert choice.kind in offered.kinds or (choice.kind is NONE and HOST in offered.kinds)
    room, missing = choice.room, choice.missing
    assert missing == room.beyond(offered)
    enough = replace(
        offered,
        device=offered.device + missing.device,
        host=offered.host + missing.host,
        disk=offered.disk + missing.disk,
    )
    assert choose(demand, enough).fits
    if choice.fits:
        assert room.device <= offered.device
        assert room.host <= offered.host
        assert room.disk <= offered.disk


@given(upkeeps, offers)
def test_a_capacity_fits_and_one_parameter_more_does_not(upkeep, offered) -> None:
    most = capacity(offered, upkeep)
    assert choose(PlaceDemand(numbers=most, upkeep=upkeep), offered).fits
    assert not choose(PlaceDemand(numbers=most + 1, upkeep=upkeep), offered).fits


@pytest.mark.parametrize(
    ("device", "host", "disk", "kind"),
    [
        (24, 50, 16, NONE),
        (28, 50, 0, NONE),  # a slot that the file has no room for stays in memory
        (23, 20, 20, HOST),
        (8, 28, 0, HOST),
        (8, 19, 36, DISK),
        (24, 0, 20, NONE),
        (12, 0, 32, DISK),
    ],
)
def test_the_first_kind_that_fits(device, host, disk, kind) -> None:
    offered = Offered(device=device, host=host, disk=disk, kinds=kinds_of("auto"))
    assert choose(PlaceDemand(numbers=1), offered).kind is kind


@pytest.mark.parametrize(
    ("offered", "missing"),
    [
        (Offered(device=7, host=20, disk=20, kinds=(HOST,)), Room(device=1)),
        (Offered(device=8, host=15, disk=20, kinds=(HOST,)), Room(host=5)),
        (Offered(device=8, host=4, disk=31, kinds=(DISK,)), Room(disk=5)),
        (Offered(device=8, host=4, disk=0, kinds=(DISK,)), Room(disk=36)),
        (Offered(device=20, disk=0, kinds=kinds_of("auto")), Room(device=12)),
        (Offered(device=20), Room(device=12)),
    ],
)
def test_what_is_missing_is_said_of_the_memory_that_lacks_it(offered, missing) -> None:
    assert choose(PlaceDemand(numbers=1), offered).missing == missing


def test_activations_are_recomputed_where_no_kind_of_offload_is_enough() -> None:
    """300 parameters: 9,600 bytes in one memory, and 1,000 bytes of activations, or 300."""
    demand = PlaceDemand(numbers=300, activations=1000, recomputable=700)
    for device, activations, fits in (
        (10_600, 1000, True),
        (10_599, 300, True),
        (9900, 300, True),
        (9899, 300, False),
    ):
        choice = choose(demand, Offered(device=device))
        assert (choice.fits, choice.activations) == (fits, activations)
    offload = Offered(device=3400, host=6000, disk=100_000, kinds=(NONE, HOST))
    assert (choose(demand, offload).kind, choose(demand, offload).activations) == (HOST, 1000)
    assert choose(replace(demand, recomputable=0), Offered(device=9900)).missing == Room(device=700)


@given(demands, offers, st.integers(1, 9))
def test_the_scratch_file_has_its_part_and_gaps_only_of_what_copies_of_states_leave(
    demand, offered, blocks
) -> None:
    choice = choose(demand, offered)
    limit = choice.scratch_limit(offered.disk, blocks)
    if choice.fits:
        assert choice.scratch <= limit <= offered.disk - (choice.room.disk - choice.scratch)
    plenty = choice.scratch_limit(1 << 40, blocks)
    assert plenty == (choice.scratch * 9 // 8 + blocks * (1 << 16) if choice.spills else 0)


def test_what_a_peer_says_that_nobody_knows_allows_no_offload() -> None:
    assert kinds_of("everything") == kinds_of("") == (NONE,)
    assert kinds_of("auto") == (NONE, HOST, DISK)


def test_a_choice_fits_if_nothing_is_missing() -> None:
    assert Choice(kind=NONE, room=Room(device=1)).fits
    assert not Choice(kind=NONE, room=Room(device=1), missing=Room(disk=1)).fits


def test_a_room_in_words() -> None:
    room = Room(device=math.ceil(7.2 * 2**30), host=12 << 30, disk=300 << 20)
    assert room_text(room, apart=True) == "7.2 GiB of GPU memory, 12.0 GiB of main memory and 300 MiB of disk"
    assert room_text(Room(device=1 << 20), apart=False) == "1 MiB of memory"
    assert room_text(Room(), apart=False) == "nothing"
