"""SWARM's wiring in hetpeer's cores: a sender picks any peer of the next stage, by how soon it will answer.

SWARM (Ryabinin et al., ICML 2023, section 3.2) gives each peer an expected time of answer, and sends to the
one that is due first (interleaved weighted round robin). A peer's time is here that of computing or of its
line from this sender, whichever is longer, as if it had been measured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from hetpeer.bootstrap.coordinator import routing
from hetpeer.stages.pipeline.routes import Hop, Roster, Route
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand


@contextmanager
def wired(devices: Devices, work: StepDemand, names: Mapping[str, int]) -> Iterator[None]:
    """While it lasts, routes are made like this. `names`: peer → its device."""

    def answer_s(sender: str | None, peer: str, begin: int, end: int) -> float:
        device = names[peer]
        computed = float(work.flops[begin:end].sum()) * work.computed / float(devices.flops[device])
        if sender is None:
            return computed
        rate = min(devices.bandwidth[names[sender], device], devices.uplink[names[sender]])
        return max(computed, float(work.crossing[begin] / max(rate, 1e-300)))

    def assign(
        ids: Iterable[int],
        roster: Roster,
        blocks: int,
        _speeds: Mapping[str, float],
        *_more: Any,
        **_others: Any,
    ) -> dict[int, Route]:
        due = dict.fromkeys(roster, 0.0)
        return {number: _way(roster, blocks, due) for number in ids}

    def _way(roster: Roster, blocks: int, due: dict[str, float]) -> Route:
        route: list[Hop] = []
        while (border := route[-1].end if route else 0) < blocks:
            sender = route[-1].peer if route else None
            peers: Collection[str] = sorted(p for p, (first, end) in roster.items() if first <= border < end)
            times = [answer_s(sender, peer, border, roster[peer][1]) for peer in peers]
            at = int(np.argmin([due[peer] + took for peer, took in zip(peers, times, strict=True)]))
            chosen = list(peers)[at]
            due[chosen] += times[at]
            route.append(Hop(chosen, border, roster[chosen][1]))
        return tuple(route)

    with patch.object(routing, "assign_routes", assign):
        yield
