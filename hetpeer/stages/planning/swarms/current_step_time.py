"""The best step time of the swarm with its present places, which a new plan has to beat. Pure.

Microbatches are passed on to any holder of the next blocks, as the coordinator routes them
(bootstrap/coordinator/routing.py): faster holders get more, in whatever pipeline they are. Links within a
pipeline are measured; an unused link to another pipeline counts as no faster than the sender's own, as routes
assume (bootstrap/state/work_shares.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand
from hetpeer.stages.planning.swarms.shared_machines import holders_s
from hetpeer.stages.planning.swarms.swarm_plan import adding_up, divided, holders_at

INSTANT_S = 1e-12
"""Least seconds of anything."""

Range = tuple[int, int]
PipelinePlace = tuple[int | None, Range]
"""A device, or None for an open place, and its blocks."""
Bools = NDArray[np.bool_]


def as_routed(devices: Devices, lines: Sequence[Sequence[PipelinePlace]], measured: Bools) -> Devices:
    """The devices as routes see them.

    Between two devices that are not neighbours in one of the pipelines `lines`, a link that was not
    `measured` ((N, N), from row to column) carries no more than the sender's best own link.
    """
    count = len(devices)
    own = np.zeros((count, count), dtype=np.bool_)
    for line in lines:
        for (one, _), (other, _) in pairwise(line):
            if one is not None and other is not None:
                own[one, other] = own[other, one] = True
    rate = np.where(own, devices.bandwidth, 0.0).max(axis=1, initial=0.0)
    way = np.where(own, devices.latency, np.inf).min(axis=1, initial=np.inf)
    guessed = ~own & ~measured & (rate > 0)[:, None]
    return replace(
        devices,
        bandwidth=np.where(guessed, np.minimum(devices.bandwidth, rate[:, None]), devices.bandwidth),
        latency=np.where(guessed, np.maximum(devices.latency, way[:, None]), devices.latency),
    )


def as_it_is(
    devices: Devices, work: StepDemand, held: Sequence[Range], routed: Devices | None = None
) -> float:
    """Seconds of a step, at best, of devices that hold the blocks `held` and route freely; infinite if a
    block has no holder.

    `routed`: the same devices as routes see them (None: as they are). At each block its holders divide all
    microbatches. A holder's first microbatch is done no earlier than the quickest round trip, nor before it
    has computed and sent it.
    """
    holders = holders_at(held, len(work))
    if not all(holders):
        return math.inf
    seen = devices if routed is None else routed
    busy = [busy_s(seen, work, held, holders, device) for device in range(len(held))]
    count, fill = work.microbatches, _fill(seen, work, holders)
    steady = max(count / sum(1.0 / busy[device] for device in some) for some in holders)
    alone = max(
        divided([(max(fill, busy[device]), busy[device]) for device in some], count) for some in holders
    )
    after = float(adding_up(devices, work, holders).max()) + work.between_s
    shared_s = holders_s(seen, work, holders, busy)
    return work.step_s(max(steady, shared_s), max(alone, fill, shared_s), after)


def busy_s(
    devices: Devices, work: StepDemand, held: Sequence[Range], holders: Sequence[list[int]], device: int
) -> float:
    """Seconds that a microbatch keeps a device busy: computing, sending, or filling its uplink."""
    begin, end = held[device]
    computing = work.computed * float(work.flops[begin:end].sum()) / float(devices.flops[device])
    sending = together = 0.0
    for border, there, times in (
        (begin, begin - 1, work.compression.backward),
        (end, end, work.compression.forward),
    ):
        if begin < end and 0 < border < len(work):
            nbytes = float(work.crossing[border]) / times
            together += nbytes
            line = float(devices.bandwidth[device, holders[there]].max())
            sending = max(sending, nbytes / max(line, 1e-300))
    return max(computing, sending, together / float(devices.uplink[device]), INSTANT_S)


def _fill(devices: Devices, work: StepDemand, holders: Sequence[list[int]]) -> float:
    """Seconds of one microbatch alone, there and back, by the quickest way with full compression."""
    per_byte = 1.0 / np.maximum(np.minimum(devices.bandwidth, devices.uplink[:, None]), 1e-300)
    done = np.zeros(len(holders[0]))
    for block, here in enumerate(holders):
        if block:
            before = holders[block - 1]
            on, back = np.ix_(before, here), np.ix_(here, before)
            hops = devices.latency[on] + devices.latency[back].T
            hops += work.crossing[block] / work.compression.forward * per_byte[on]
            hops += work.crossing[block] / work.compression.backward * per_byte[back].T
            stays = np.equal.outer(before, here)
            done = (done[:, None] + np.where(stays, 0.0, hops)).min(axis=0)
        done = done + work.computed * work.flops[block] / devices.flops[here]
    return float(done.min())
