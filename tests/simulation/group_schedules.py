"""Random schedules of the group scheduler, and what must hold in each: `python -m
tests.simulation.group_schedules --count 500`.

Checked while it happens, from the groups alone: the last P of a stage connect everybody who is present
(SDPipe's Assumption 1), nobody averages a stage while it computes or averages it; and everybody who is
present goes on for ever.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetpeer.averaging.groups.group_scheduler import Group, GroupPipelines
from hetpeer.averaging.groups.wait_window import Adaptive, WaitWindow
from tests.simulation.sdpipe import Artifact, GroupScheduler, Paper
from tests.simulation.sim_pipelines import PipelineSetting, SimPipelines, names

ROUNDS = 30
"""Iterations that every present pipeline has to reach."""
AVERAGE_S = (0.0, 0.02, 0.5)
"""Seconds of an averaging, in turn."""
RULES = ("pipelines", "paper", "artifact")


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """Result of one schedule."""

    seed: int
    violation: str | None
    apart: int
    """How often the last P groups of a stage did not connect all pipelines."""
    groups: int
    came: int
    went: int


class GroupWatch:
    """Checks every group: the last `span` groups per member must connect all members."""

    def __init__(self, span: int, stages: int, members: Sequence[str]) -> None:
        self.groups = self.apart = 0
        self._span = span
        self._members = set(members)
        self._shared: list[list[list[set[str]]]] = [[[]] for _ in range(stages)]
        """Stage → group by group: its members, and pairs (newcomer, the pipeline that it copied) since.

        The first entry is from before any group.
        """

    def joined(self, name: str, like: str) -> None:
        self._members.add(name)
        for shared in self._shared:
            shared[-1].append({name, like})

    def left(self, name: str) -> None:
        self._members.discard(name)

    def formed(self, group: Group) -> None:
        shared = self._shared[group.stage]
        _require(group.number == len(shared), f"{group} is number {len(shared)}")
        _require(set(group.members) <= self._members, f"{group} has somebody who is gone")
        _require(len(set(group.members)) == len(group.members) > 0, f"{group} is none")
        self.groups += 1
        shared.append([set(group.members)])
        last = self._span * len(self._members)
        if group.number >= last and not _connected(self._members, shared[-last:]):
            self.apart += 1


def _connected(members: set[str], shared: Sequence[Sequence[set[str]]]) -> bool:
    """Whether the groups connect all members; by flooding, so that no code is shared with the scheduler."""
    edges = [who & members for several in shared for who in several]
    reached = {min(members)}
    while True:
        more = reached.union(*(who for who in edges if who & reached))
        if more == reached:
            return reached == members
        reached = more


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def schedule(seed: int, rules: str = RULES[0]) -> ScheduleOutcome:
    """One random swarm with stragglers and churn. Never raises: a violation is in the outcome."""
    draw = random.Random(seed)
    setting = PipelineSetting(
        pipelines=draw.choice((1, 2, 3, 4, 5, 8, 12)),
        stages=draw.choice((1, 2, 3, 4)),
        microbatches=draw.choice((1, 2, 4)),
        stage_s=draw.choice((0.02, 0.1)),
        sleep_s=draw.choice((0.0, 0.05, 0.6)),
        chance=draw.choice((0.1, 0.5)),
        average_s=lambda size: AVERAGE_S[seed % 3] if size > 1 else 0.0,
    )
    present = names(setting.pipelines)
    span = draw.choice((1, 2, 3, 10))
    window = draw.choice(
        (
            lambda: Adaptive(span),
            lambda: WaitWindow(0.0),
            lambda: WaitWindow(math.inf),
            lambda: WaitWindow(0.05),
        )
    )
    watch = GroupWatch(span, setting.stages, present)
    swarm = SimPipelines(setting, scheduler(rules, setting.stages, present, span, window), seed, watch.formed)
    came = went = 0
    violation = None
    try:
        for turn in range(2, ROUNDS, 2):
            swarm.run(lambda turn=turn: min(swarm.iterations.values()) >= turn)  # type: ignore[misc]
            what = draw.random()
            if what < 0.25 and len(swarm.iterations) > 1:
                gone = draw.choice(sorted(swarm.iterations))
                watch.left(gone)
                swarm.leave(gone)
                went += 1
            elif what < 0.5:
                name, like = f"q{turn:04}", draw.choice(sorted(swarm.iterations))
                watch.joined(name, like)
                swarm.join(name, like)
                came += 1
    except (AssertionError, LookupError, RuntimeError, ValueError) as error:
        violation = f"{type(error).__name__}: {error}"
    return ScheduleOutcome(seed, violation, watch.apart, watch.groups, came, went)


def scheduler(
    rules: str, stages: int, workers: Sequence[str], span: int | None, window: Callable[[], WaitWindow]
) -> GroupScheduler:
    """The scheduler with these rules; the artifact has its own span and window."""
    if rules == "pipelines":
        return GroupPipelines(stages, workers, span, window())
    return Paper(stages, workers, span, window) if rules == "paper" else Artifact(stages, workers)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--rules", choices=RULES, default=RULES[0])
    options = parser.parse_args()
    outcomes = [schedule(seed, options.rules) for seed in range(options.seed, options.seed + options.count)]
    for outcome in outcomes:
        if outcome.violation:
            print(outcome)
    print(
        f"{len(outcomes)} schedules, {sum(o.groups for o in outcomes)} groups,"
        f" {sum(o.came for o in outcomes)} came, {sum(o.went for o in outcomes)} went:"
        f" {sum(o.violation is not None for o in outcomes)} broken,"
        f" in {sum(o.apart > 0 for o in outcomes)} somebody was apart"
    )
    return any(outcome.violation for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
