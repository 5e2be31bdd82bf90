"""A plan: pipelines side by side that share a step's microbatches and add up their gradients, and how long a step of it takes.

T = max over pipelines of (FILL + (n - 1) BOTTLENECK) + SYNC: pipelines as in FusionLLM's Eq. 3, sums as in DT-FM's Eq. 2 but divided by uplinks, as the
reduce divides them (docs/averaging.md). Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetpeer.stages.planning.swarms.given import Devices, Floats, Work
from hetpeer.stages.planning.swarms.pipelines import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Seconds of a step, and what makes them."""

    pipelines: tuple[Pipeline, ...]
    shares: tuple[int, ...]
    """Microbatches of each."""
    pipeline_s: float
    sync_s: float
    bottleneck: tuple[str, int]
    """What is busy for the longest part of a step: (`computing`, `sending` or `adding up`, device)."""

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.sync_s


def planned(devices: Devices, work: Work, pipelines: Sequence[Pipeline]) -> Plan:
    """What these pipelines make together, without those that are of no use."""
    pipeline_s, shares = share_out(pipelines, work.microbatches)
    used = [(one, share) for one, share in zip(pipelines, shares, strict=True) if share]
    adding = adding_up(devices, work, holders_of([one for one, _ in used]))
    last, _ = max(used, key=lambda pair: pair[0].seconds(pair[1]))
    sync_s = float(adding.max())
    return Plan(
        pipelines=tuple(one for one, _ in used),
        shares=tuple(share for _, share in used),
        pipeline_s=pipeline_s,
        sync_s=sync_s,
        bottleneck=last.slowest if pipeline_s >= sync_s else ("adding up", int(adding.argmax())),
    )


def share_out(pipelines: Sequence[Pipeline], microbatches: int) -> tuple[float, tuple[int, ...]]:
    """The least time in which the pipelines do so many, and how many each does.

    All that are done by the time t: floor((t - fill) / period) + 1 each. The time at which they would be done if they could be divided is a
    lower bound; the few that are left then go one by one to whoever is done with one more first.
    """
    least = _divided(pipelines, microbatches)
    shares = [
        max(0, min(microbatches, int((least - one.fill) / one.period) + 1)) if least >= one.fill else 0
        for one in pipelines
    ]
    left = microbatches - sum(shares)
    while left < 0:  # rounding
        most = max(range(len(shares)), key=lambda n: pipelines[n].seconds(shares[n]))
        shares[most] -= 1
        left += 1
    queue = [
        (one.seconds(share + 1), n) for n, (one, share) in enumerate(zip(pipelines, shares, strict=True))
    ]
    heapq.heapify(queue)
    for _ in range(left):
        _, n = queue[0]
        shares[n] += 1
        heapq.heapreplace(queue, (pipelines[n].seconds(shares[n] + 1), n))
    done = max(one.seconds(share) for one, share in zip(pipelines, shares, strict=True))
    return done, tuple(shares)


def _divided(pipelines: Sequence[Pipeline], microbatches: int) -> float:
    """When all would be done if a microbatch could be shared: sum over those that have begun of (t - fill) / period + 1 = n; a lower bound."""
    speed = offset = done = 0.0
    ordered = sorted(pipelines, key=lambda one: one.fill - one.period)
    for place, one in enumerate(ordered):
        speed += 1.0 / one.period
        offset += one.fill / one.period - 1.0
        done = (microbatches + offset) / speed
        if place + 1 < len(ordered) and done <= ordered[place + 1].fill - ordered[place + 1].period:
            break
    return done


def holders_of(pipelines: Sequence[Pipeline]) -> list[list[int]]:
    """Of each block, one device of each pipeline."""
    lines = [np.repeat(pipeline.devices, np.diff(pipeline.cuts)) for pipeline in pipelines]
    holders: list[list[int]] = np.array(lines).T.tolist()
    return holders


def adding_up(devices: Devices, work: Work, holders: Sequence[Sequence[int]]) -> Floats:
    """Seconds that each device takes to add up the gradients of its blocks (`holders` of each): with N holders of uplinks u, V max(1 / min u, 2 (N - 1) / sum u) and two hops; a device with several
    blocks sends them one after the other.
    """
    busy = np.zeros(len(devices))
    begin = 0
    for end in range(1, len(work) + 1):  # blocks with the same holders are one
        if end < len(work) and holders[end] == holders[begin]:
            continue
        peers = np.array(holders[begin], dtype=np.intp)
        if len(peers) < 2:
            begin = end
            continue
        others = devices.bandwidth[np.ix_(peers, peers)].sum(axis=1) - devices.bandwidth[peers, peers]
        rates = np.minimum(devices.uplink[peers], others / (len(peers) - 1))
        apart = devices.latency[np.ix_(peers, peers)] * ~np.eye(len(peers), dtype=np.bool_)
        each = max(1.0 / rates.min(), 2 * (len(peers) - 1) / rates.sum())
        busy[peers] += work.reduced[begin:end].sum() / work.compression.reduce * each + 2 * apart.max()
        begin = end
    return busy
