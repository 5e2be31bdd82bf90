"""Work that honest volunteers get done, and its cost, while others are on the same machine."""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.chaos import look
from benchmarks.swarm import Swarm, cpu_seconds
from tests.wanlab.processors import Processor

REFUSED = re.compile(r"(\w+) is refused for")


def refused(log: Path) -> list[str]:
    """Ends of the ids of peers that a process refused, by its log."""
    return REFUSED.findall(log.read_text(errors="replace"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """From when to when, and seconds of processor time of all honest processes, and of all others."""

    begin: float
    end: float
    honest_s: float
    hostile_s: float

    @property
    def hostile_cores(self) -> float:
        """So many processors the attackers had for themselves: their own ones, where it is no laboratory."""
        return self.hostile_s / (self.end - self.begin)


class SlowWorkers(AbstractContextManager["SlowWorkers"]):
    """Compute workers of `swarm` that have `cores` of a processor each (tests/wanlab/processors.py), and
    keep them to the end.
    """

    def __init__(self, swarm: Swarm, cores: float) -> None:
        self._swarm = swarm
        self._cores = cores
        self._held: set[int] = set()
        self._processors = ExitStack()

    def hold(self) -> None:
        """Those that have come since."""
        for process in self._swarm.processes()["worker"]:
            if process.pid not in self._held:
                with suppress(ProcessLookupError):
                    self._processors.enter_context(Processor(process.pid, self._cores))
                    self._held.add(process.pid)

    def __exit__(self, *error: object) -> None:
        self._processors.close()


@dataclass(slots=True)
class Watch:
    """Work of the honest volunteers so far, and what they take."""

    swarm: Swarm
    honest: int
    """Volunteers, on nodes from 1 on."""
    microbatches: int
    """Of a step."""
    hostile: Callable[[], Iterable[int]]
    """The processes that attackers have started themselves."""
    slow: SlowWorkers
    before: dict[int, int] = field(default_factory=dict)
    """Node → bytes of memory of its processes when the attacks began."""
    most: dict[int, int] = field(default_factory=dict)
    """The same at its worst."""

    async def during(self, seconds: float) -> Period:
        """Figures of the next `seconds`."""
        self.slow.hold()
        began = time.monotonic()
        families = self._honest, self.hostile
        before = [self._cpu(family()) for family in families]
        after = [dict(known) for known in before]
        while (now := time.monotonic()) - began < seconds:
            for node, nbytes in self.memory().items():
                self.most[node] = max(self.most.get(node, 0), nbytes)
            self.slow.hold()
            for _ in range(20):
                await look(self.swarm)
            for known, family in zip(after, families, strict=True):
                known.update(self._cpu(family()))  # what ends meanwhile has taken what was seen of it
            self.swarm.check()
        honest_s, hostile_s = (
            sum(known[pid] - first.get(pid, 0.0) for pid in known)
            for first, known in zip(before, after, strict=True)
        )
        return Period(begin=began, end=now, honest_s=honest_s, hostile_s=hostile_s)

    def _honest(self) -> list[int]:
        """The processes that we have started, the coordinator's first."""
        return [self.swarm.bootstrap.pid, *(self.swarm.volunteers[n].pid for n in range(1, self.honest + 1))]

    def _cpu(self, pids: Iterable[int]) -> dict[int, float]:
        """Process → seconds of processor time so far, of these and all their children."""
        found = {}
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(pid)
                family = [parent, *parent.children(recursive=True)]
                found |= dict(zip((one.pid for one in family), cpu_seconds(family), strict=True))
        return found

    def memory(self) -> dict[int, int]:
        """Of each honest node, the coordinator's included."""
        found = {}
        for node, pid in enumerate(self._honest()):
            with suppress(psutil.NoSuchProcess):
                daemon = psutil.Process(pid)
                family = [daemon, *daemon.children(recursive=True)]
                found[node] = sum(one.memory_info().rss for one in family)
        return found

    def goodput(self, when: Period) -> float:
        """Microbatches a second that were committed then; of a step that was under way at its border, a
        part.
        """
        times = [one.at for one in self.swarm.feed.seen if one.record["kind"] == "commit"]
        steps = _steps_at(times, when.end) - _steps_at(times, when.begin)
        return self.microbatches * steps / (when.end - when.begin)

    def cost(self, when: Period) -> float:
        """Seconds of the honest ones' processors for each of those."""
        return (
            when.honest_s / (goodput * (when.end - when.begin))
            if (goodput := self.goodput(when))
            else math.inf
        )


def _steps_at(times: Sequence[float], at: float) -> float:
    """How many steps were done at a moment, of which one counts in part."""
    done = bisect_right(times, at)
    if not 0 < done < len(times):
        return float(done)
    return done + (at - times[done - 1]) / (times[done] - times[done - 1])
