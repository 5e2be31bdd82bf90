"""Lines of simulated swarms are made when they are used, and what they carry does not depend on it."""

import math
import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.peer.simulate.network.sim_uplinks import SimHardware, SimUplinks
from hetpeer.peer.simulate.network.world import World
from hetpeer.stages.planning.swarms.plan_inputs import Devices
from hetpeer.stages.planning.uplinks import PeerLink, Uplink
from tests.stages.test_planning_swarms import some_work

MIB = 1 << 20


def equal(count: int) -> SimHardware:
    """Devices that are all alike."""
    devices = Devices(
        flops=np.full(count, 1e12),
        memory=np.full(count, 1e10),
        uplink=np.full(count, 1e7),
        latency=np.full((count, count), 0.01),
        bandwidth=np.full((count, count), 1e7),
    )
    return SimHardware(devices=devices, work=some_work(4, 0), target_s=1.0)


def test_a_thousand_devices_have_no_line_that_nobody_uses():
    """Each sends to three others; all of their lines would be a million, of a kilobyte each."""
    hardware, world, names = equal(1000), World(0), [f"v{number}" for number in range(1000)]
    arrived = []
    tracemalloc.start()
    try:
        uplinks = SimUplinks(world, names, hardware)
        for number, name in enumerate(names):
            for further in (1, 10, 100):
                other = names[(number + further) % 1000]
                uplinks.send(name, other, 1e7, lambda: arrived.append(world.now))
        world.run(60.0, lambda: len(arrived) == 3000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.allclose(arrived, 3.0)
    assert peak < 32 * MIB


def arrivals(capacity, nbytes, order):
    """Arrival of a bundle on each of several equally fast links, if they are used in this order."""
    world, there = World(0), {}
    uplink = Uplink(world, capacity, {to: PeerLink(rate=10.0) for to in nbytes})
    for to in order:
        uplink.send(to, nbytes[to], lambda to=to: there.setdefault(to, world.now))
    world.run(math.inf, lambda: len(there) == len(nbytes))
    return there


@given(
    st.sampled_from([0.7, 1.0, 1.7]),
    st.dictionaries(st.sampled_from("abcdefg"), st.floats(0.1, 10.0), min_size=3),
    st.randoms(),
)
def test_the_order_in_which_lines_are_first_used_changes_no_bit(capacity, nbytes, random):
    """One share differs by rounding; the order of the links decides which one."""
    order = list(nbytes)
    random.shuffle(order)
    assert arrivals(capacity, nbytes, nbytes) == arrivals(capacity, nbytes, order)
