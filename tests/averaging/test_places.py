"""The place that a volunteer chooses, what is said where none fits, and versions that know no offload."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.averaging.member.position import choose_place
from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.pipeline.place_memory import Offered, PlaceDemand, Upkeep, choose, kinds_of

GIB = 1 << 30
DEMAND = PlaceDemand(
    numbers=335_000_000,
    halved=300_000_000,
    constants=1 << 20,
    activations=GIB,
    copies=GIB >> 1,
    upkeep=Upkeep(behind=1, means=1),
)


def place(demand: PlaceDemand, begin: int = 0, **fields: object) -> m.Place:
    known = {"cluster": 0, "begin": begin, "end": begin + 1, "flops": 1.0, "holders": 0, "open": True}
    return m.Place(**{**known, **m.demand_fields(demand), **fields})


def test_a_place_says_all_that_decides_whether_it_fits() -> None:
    sent = m.encode(m.Refused(why="taken", places=(place(DEMAND),)))
    (received,) = m.decode(sent).places
    assert received.demand == DEMAND
    assert received.memory_bytes == DEMAND.in_one_memory


def test_a_place_of_an_older_coordinator_takes_its_bytes_on_the_device() -> None:
    old = m.Place(cluster=0, begin=0, end=1, memory_bytes=GIB, flops=1.0, holders=0, open=True)
    for kind in Offload:
        room = old.demand.room(kind, apart=True)
        assert (room.device, room.host, room.disk) == (GIB, 0, 0)


def test_a_hello_says_what_is_offered_and_an_older_one_allows_no_offload() -> None:
    told = {"memory_bytes": 8 * GIB, "host_bytes": 16 * GIB, "disk_bytes": 30 * GIB}
    hello = m.decode(m.encode(m.Hello(run="r", incarnation=1, offload="auto", **told)))
    assert hello.offered == Offered(device=8 * GIB, host=16 * GIB, disk=30 * GIB, kinds=tuple(Offload))
    old = m.Hello(run="r", incarnation=1, memory_bytes=8 * GIB)
    assert old.offered == Offered(device=8 * GIB)
    assert list(old.offered.ways()) == [(Offload.NONE, False)]
    assert m.Hello(run="r", incarnation=1).offered is None, "nothing is said, and anything fits"


def test_both_sides_decide_with_the_same_numbers() -> None:
    """The largest place that fits is claimed; it fits with some kind, if not with every one."""
    small, large = (PlaceDemand(numbers=count) for count in (100_000_000, 335_000_000))
    places = [place(small, 0), place(large, 1), place(PlaceDemand(numbers=10**9), 2)]
    offered = Offered(device=4 * GIB, host=8 * GIB, disk=8 * GIB, kinds=kinds_of("auto"))
    assert choose_place(places, offered).begin == 1
    assert choose(places[1].demand, offered).kind is Offload.HOST
    one = Offered(device=4 * GIB, host=8 * GIB, disk=8 * GIB, kinds=kinds_of("none"))
    assert choose_place(places, one).begin == 0


@pytest.mark.parametrize(
    ("offered", "why"),
    [
        (
            Offered(device=2 * GIB, host=16 * GIB, disk=40 * GIB, kinds=kinds_of("auto")),
            "512 MiB of GPU memory too little",
        ),
        (
            Offered(device=3 * GIB, host=3 * GIB, disk=40 * GIB, kinds=kinds_of("host")),
            "3.2 GiB of main memory too little",
        ),
        (
            Offered(device=3 * GIB, host=3 * GIB, disk=4 * GIB, kinds=kinds_of("disk")),
            "7.2 GiB of disk too little",
        ),
        (Offered(device=GIB), "9.0 GiB of memory too little"),
    ],
)
def test_the_memory_that_has_too_little_is_named(offered: Offered, why: str) -> None:
    demand = PlaceDemand(numbers=335_544_320)  # 2.5 GiB for weights and gradient
    with pytest.raises(LocalError) as refused:
        choose_place([place(demand)], offered)
    assert refused.value.code == "HP-FIT-001"
    assert why in refused.value.why


def test_without_an_open_place_nothing_is_missing() -> None:
    with pytest.raises(LocalError, match="no place is open"):
        choose_place([place(DEMAND, open=False)], Offered(device=GIB))
