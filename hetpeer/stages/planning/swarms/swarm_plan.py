"""A plan and its step time: pipelines side by side that share a step's microbatches and reduce their
gradients; and the refinement of its cuts for the whole step.

Pure; `on` of the refinement says when to stop. T = max over pipelines of (FILL + (n - 1) BOTTLENECK) + SYNC +
BETWEEN: pipelines as in FusionLLM's Eq. 3, reduces as in DT-FM's Eq. 2 but divided by uplinks, as in
docs/averaging.md. For steps that overlap, T = max(n BOTTLENECK, SYNC + BETWEEN, (FILL + (n - 1) BOTTLENECK +
SYNC + BETWEEN) / (S + 1)). Pipelines that train batches of their own and average after H of them have a T
each, with SYNC / H and n = M; together they do sum of 1 / T batches in a second.

Cuts with the least period (pipeline_cuts.py) need not give the shortest step: the first microbatch and the
reduce count too, and pipelines cut alike reduce with fewer peers.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hetpeer.stages.planning.swarms.departure_costs import DepartureCosts, HeldPlace, departure_costs
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts, PlannedPipeline
from hetpeer.stages.planning.swarms.plan_inputs import Averaging, Devices, Floats, StepDemand
from hetpeer.stages.planning.swarms.shared_machines import line_rates, pipelines_s, together


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmPlan:
    """Seconds of a step, and their parts."""

    pipelines: tuple[PlannedPipeline, ...]
    shares: tuple[int, ...]
    """Microbatches of each pipeline."""
    total_s: float
    """Seconds from one step to the next, or from batch to batch if pipelines train their own batches."""
    pipeline_s: float
    """The pipelines alone."""
    sync_s: float
    """The reduce alone; a batch's part of an averaging."""
    update_s: float
    """The slowest update's way between device, main memory and disk."""
    bottleneck: tuple[str, int]
    """The busiest part of a step: (`computing`, `sending` or `adding up`, device)."""
    departures: DepartureCosts | None = None
    """Cost of departures; None: nobody says how often it leaves."""

    @property
    def expected_s(self) -> float:
        """Seconds from one step to the next, departures included."""
        return self.total_s if self.departures is None else self.departures.step_s


def planned(
    devices: Devices,
    work: StepDemand,
    pipelines: Sequence[PlannedPipeline],
    held: Sequence[tuple[int, int]] = (),
) -> SwarmPlan:
    """The plan with these pipelines, without those that are of no use.

    `held`: the blocks of each device. Devices outside the plan's pipelines keep them, and take part in their
    reduces (empty: they do not).
    """
    if work.averaging is not None:
        return _averaging(devices, work, pipelines, work.averaging)
    shares = _shares(work, pipelines)
    used = [(one, share) for one, share in zip(pipelines, shares, strict=True) if share]
    holders = holders_of([one for one, _ in used])
    if held:
        within = {device for one, _ in used for device in one.devices}
        beside = [(0, 0) if device in within else place for device, place in enumerate(held)]
        holders = [one + more for one, more in zip(holders, holders_at(beside, len(work)), strict=True)]
    adding = adding_up(devices, work, holders)
    sync_s = float(adding.max())
    shared_s = pipelines_s(devices, work, [(one.devices, one.cuts, share) for one, share in used])
    steady = max(shared_s, *(share * one.period for one, share in used))
    alone = max(shared_s, *(one.seconds(share) for one, share in used))
    pipeline_s = work.step_s(steady, alone, 0.0)
    update_s = max(one.update for one, _ in used)
    last, _ = max(used, key=lambda pair: pair[0].seconds(pair[1]))
    total_s = work.step_s(steady, alone, sync_s + work.between_s + update_s)
    return SwarmPlan(
        pipelines=tuple(one for one, _ in used),
        shares=tuple(share for _, share in used),
        total_s=total_s,
        pipeline_s=pipeline_s,
        sync_s=sync_s,
        update_s=update_s,
        bottleneck=last.slowest if pipeline_s >= sync_s else ("adding up", int(adding.argmax())),
        departures=None
        if devices.departures is None
        else departure_costs(devices, work, _places(used, held, work.microbatches), total_s),
    )


def _places(
    used: Sequence[tuple[PlannedPipeline, int]], held: Sequence[tuple[int, int]], microbatches: int
) -> list[HeldPlace]:
    """Places in pipelines (`used`: with their microbatches), and those of devices in none of them."""
    within = {device for one, _ in used for device in one.devices}
    return [
        HeldPlace(device, begin, end, share / microbatches)
        for one, share in used
        for device, (begin, end) in zip(one.devices, pairwise(one.cuts), strict=True)
    ] + [HeldPlace(device, *place, 0.0) for device, place in enumerate(held) if device not in within]


def _averaging(
    devices: Devices, work: StepDemand, pipelines: Sequence[PlannedPipeline], how: Averaging
) -> SwarmPlan:
    """The plan if each pipeline does all microbatches of its own batches.

    A run groups pipelines as they get ready; here all average together, which takes longest.
    """
    count = work.microbatches
    adding = adding_up(devices, work, holders_of(pipelines))
    sync_s = float(adding.max()) / how.interval
    batches = [work.step_s(count * one.period, one.seconds(count), 0.0) for one in pipelines]
    pipeline_s = _together(batches)
    each = [batch + work.between_s + one.update for batch, one in zip(batches, pipelines, strict=True)]
    total = [max(batch, sync_s) if how.delayed else batch + sync_s for batch in each]
    slowest = pipelines[int(np.argmax(batches))].slowest
    return SwarmPlan(
        pipelines=tuple(pipelines),
        shares=(count,) * len(pipelines),
        total_s=_together(total),
        pipeline_s=pipeline_s,
        sync_s=sync_s / len(pipelines),
        update_s=max(one.update for one in pipelines),
        bottleneck=slowest if max(batches) >= sync_s else ("adding up", int(adding.argmax())),
    )


def _together(seconds: Sequence[float]) -> float:
    """Seconds from one result to the next of several that take `seconds` each."""
    return 1.0 / sum(1.0 / one for one in seconds)


def _shares(work: StepDemand, pipelines: Sequence[PlannedPipeline]) -> tuple[int, ...]:
    """Microbatches of each pipeline; of pipelines that never empty none begins later than another."""
    begun = [replace(one, fill=one.period) for one in pipelines] if work.staleness else pipelines
    return share_out(begun, work.microbatches)


def share_out(pipelines: Sequence[PlannedPipeline], microbatches: int) -> tuple[int, ...]:
    """Microbatches of each pipeline, for which all of them together take the least seconds.

    By the time t each does floor((t - fill) / period) + 1. The time at which they would be done if
    microbatches could be divided is a lower bound; the few that are left go one by one to the pipeline that
    finishes one more first.
    """
    least = divided([(one.fill, one.period) for one in pipelines], microbatches)
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
    return tuple(shares)


def divided(ways: Sequence[tuple[float, float]], microbatches: int) -> float:
    """Seconds until all are done if microbatches could be divided: a lower bound.

    Each of `ways` is (seconds to its first microbatch, seconds for each further one). The sum over those that
    have begun of (t - fill) / period + 1 is n.
    """
    speed = offset = done = 0.0
    ordered = sorted(ways, key=lambda way: way[0] - way[1])
    for place, (fill, period) in enumerate(ordered):
        speed += 1.0 / period
        offset += fill / period - 1.0
        done = (microbatches + offset) / speed
        if place + 1 < len(ordered) and done <= ordered[place + 1][0] - ordered[place + 1][1]:
            break
    return done


def holders_of(pipelines: Sequence[PlannedPipeline]) -> list[list[int]]:
    """Holders of each block: one device of each pipeline."""
    lines = [np.repeat(pipeline.devices, np.diff(pipeline.cuts)) for pipeline in pipelines]
    holders: list[list[int]] = np.array(lines).T.tolist()
    return holders


def holders_at(held: Sequence[tuple[int, int]], blocks: int) -> list[list[int]]:
    """Devices that hold each block; `held`: the blocks [begin, end) of each device."""
    return [
        [device for device, (begin, end) in enumerate(held) if begin <= block < end]
        for block in range(blocks)
    ]


def adding_up(devices: Devices, work: StepDemand, holders: Sequence[Sequence[int]]) -> Floats:
    """Seconds that each device takes to reduce the gradients of its blocks (`holders` of each).

    Shares follow from the uplinks, as in the reduce (averaging/reduce/reduce_shards.py). The slowest uplink
    and the slowest link are waited for, and two hops. A device with several blocks sends them one after the
    other, and a line carries what all behind it send.
    """
    busy, sent = np.zeros(len(devices)), np.zeros(len(devices))
    begin = 0
    for end in range(1, len(work) + 1):  # blocks with the same holders are one
        if end < len(work) and holders[end] == holders[begin]:
            continue
        peers = np.array(holders[begin], dtype=np.intp)
        if len(peers) < 2:
            begin = end
            continue
        apart = ~np.eye(len(peers), dtype=np.bool_)
        lines = devices.bandwidth[np.ix_(peers, peers)]
        latency = devices.latency[np.ix_(peers, peers)] * apart
        nbytes = work.reduced[begin:end].sum() / work.compression.reduce
        busy[peers] += (
            nbytes * _each(devices.uplink[peers], np.where(apart, lines, np.inf)) + 2 * latency.max()
        )
        if (sharing := devices.sharing) is not None:
            abroad = (sharing.line[peers][:, None] != sharing.line[peers]).sum(axis=1)
            sent[peers] += nbytes * 2 * abroad / len(peers)
        begin = end
    if (sharing := devices.sharing) is not None:
        rates = np.maximum(line_rates(devices, sharing), 1e-300)
        busy = np.maximum(busy, together(sharing.line, sent) / rates)
    return busy


def _each(uplinks: Floats, lines: Floats) -> float:
    """Seconds for each byte of the vector that N holders reduce. `lines` is (N, N), infinite on the diagonal.

    A holder that reduces the share s sends 1 + (N - 2) s of the vector in all: with the fastest k reducing,
    all of them are done at (N - 2 + k) / (sum of their uplinks), and nobody else would be done before that.
    From i to j go i's part of j's share and the sum of i's.
    """
    count = len(uplinks)
    rates = np.minimum(uplinks, np.where(np.isfinite(lines), lines, 0.0).sum(axis=1))
    order = np.argsort(-rates, kind="stable")
    done = (count - 2 + np.arange(1, count + 1)) / np.maximum(np.cumsum(rates[order]), 1e-300)
    beside = np.append(1.0 / np.maximum(rates[order][1:], 1e-300), np.inf)
    reducing = int((beside >= done).argmax()) + 1
    shares = np.zeros(count)
    chosen = order[:reducing]
    shares[chosen] = (rates[chosen] * done[reducing - 1] - 1.0) / (count - 2) if count > 2 else 1.0 / reducing
    shares = np.maximum(shares, 0.0)
    slowest = ((shares[:, None] + shares[None, :]) / np.maximum(lines, 1e-300)).max()
    return float(max(done[reducing - 1], 1.0 / max(rates.min(), 1e-300), slowest))


OrdersAndCuts = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""(devices in order, cuts of the blocks) for each pipeline."""
NOTICED = 1e-9
"""Improvements below this fraction of a step do not count."""


class CutRefinement:
    """Plans of `devices` for `work` with given borders. `pipelines` is their cache of cuts."""

    def __init__(self, devices: Devices, work: StepDemand, pipelines: PipelineCuts) -> None:
        self._devices, self._work, self._pipelines = devices, work, pipelines

    def plan(self, lines: OrdersAndCuts) -> SwarmPlan | None:
        """The plan with these cuts; None if memory or links do not allow them."""
        made = []
        for order, cuts in lines:
            one = self._pipelines.at(order, cuts)
            if one is None:
                return None
            made.append(one)
        return planned(self._devices, self._work, made)

    def alike(self, orders: Sequence[tuple[int, ...]]) -> SwarmPlan | None:
        """The plan with equal parts; None if there is none."""
        blocks = len(self._work)
        if any(len(order) > blocks for order in orders):
            return None
        return self.plan(
            tuple(
                (order, tuple(blocks * stage // len(order) for stage in range(len(order) + 1)))
                for order in orders
            )
        )

    def settled(self, plan: SwarmPlan, on: Callable[[], bool]) -> SwarmPlan:
        """`plan` with borders moved by one block, of one pipeline or of all with equally many stages, while
        that helps.

        Stops when `on` is false.
        """
        better = True
        while better:
            better = False
            for lines in self._moved(tuple((one.devices, one.cuts) for one in plan.pipelines)):
                if not on():
                    return plan
                other = self.plan(lines)
                if other is not None and other.expected_s < plan.expected_s * (1.0 - NOTICED):
                    plan, better = other, True
                    break
        return plan

    def _moved(self, lines: OrdersAndCuts) -> Iterator[OrdersAndCuts]:
        """All variants that differ in one border."""
        alike: dict[int, list[int]] = defaultdict(list)
        for number, (order, _) in enumerate(lines):
            alike[len(order)].append(number)
        together = [group for group in alike.values() if len(group) > 1]
        for group in [*together, *([number] for number in range(len(lines)))]:
            for border in range(1, len(lines[group[0]][0])):
                for by in (-1, 1):
                    moved = list(lines)
                    for number in group:
                        order, cuts = lines[number]
                        moved[number] = (order, (*cuts[:border], cuts[border] + by, *cuts[border + 1 :]))
                    if all(c[border - 1] < c[border] < c[border + 1] for _, c in (moved[n] for n in group)):
                        yield tuple(moved)
