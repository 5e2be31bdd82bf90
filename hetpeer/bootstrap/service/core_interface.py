"""The coordinator's core for a run's mode, and the start of a term from the log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetpeer.averaging.groups.group_scheduler import GroupPipelines
from hetpeer.averaging.groups.wait_window import FREE, WAITED, Adaptive, WaitWindow
from hetpeer.bootstrap.admission.admission import Admission
from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.grouped.grouped_run import GroupedRun
from hetpeer.bootstrap.log.history import History, Record
from hetpeer.bootstrap.log.volunteer_log_files import VolunteerLogs
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.seat_plan import SeatPlan
from hetpeer.bootstrap.run.settings import AveragingSettings
from hetpeer.bootstrap.state.context import is_complete, whole_run
from hetpeer.bootstrap.state.core_config import coordinator_config
from hetpeer.bootstrap.state.effects import CoordinatorConfig
from hetpeer.bootstrap.state.placement_policies import DEFAULT

Core = Coordinator | GroupedRun
"""A core: messages and time in, effects out. `receive` raises `ProtocolError` for a dishonest message."""


def new_core(
    config: CoordinatorConfig, averaging: AveragingSettings | None, records: Iterable[Record], now: float
) -> Core:
    """The core of a new term over the run with the log `records`."""
    if averaging is None:
        return Coordinator(whole_run(config, History.of(records, whole=False)), now)
    window = window_of(averaging, trains_on=config.averaging_delayed and config.staleness > 0)
    return GroupedRun(config, records, GroupPipelines(1, (), averaging.span, window), now)


def window_of(averaging: AveragingSettings, *, trains_on: bool) -> WaitWindow:
    """The window for which the first ready cluster waits; `trains_on`: it does not stand still meanwhile."""
    match averaging.window_s:
        case "adaptive":
            return Adaptive(averaging.span, FREE if trains_on else WAITED, busy=averaging.delayed)
        case "all":
            return WaitWindow(math.inf)
        case seconds:
            return WaitWindow(seconds)


def is_over(
    config: CoordinatorConfig, averaging: AveragingSettings | None, records: Sequence[Record]
) -> bool:
    """Whether nothing is left to do in the run with the log `records`."""
    if averaging is None:
        return is_complete(config, History.of(records, whole=False))
    return GroupedRun(config, records, GroupPipelines(1, (), averaging.span, WaitWindow(0.0)), 0.0).over


@dataclass(frozen=True, slots=True)
class LeaderStart:
    """The core, the admission rules and the volunteers' logs at the start of a term."""

    core: Core
    admission: Admission
    logs: VolunteerLogs

    @classmethod
    def of(
        cls,
        run: RunDirectory,
        records: Sequence[Record],
        now: float,
        *,
        placement: str | None = DEFAULT,
        plan: SeatPlan | None = None,
    ) -> LeaderStart:
        """The start that follows from `records`, at `now`; `placement` and `plan` as in `coordinator_config`.

        Call it in a thread: a log of months takes seconds, and a leader without heartbeats is deposed.
        """
        manifest = run.manifest
        config = coordinator_config(run, placement=placement, weighted=True, plan=plan)
        return cls(
            core=new_core(config, manifest.averaging, records, now),
            admission=Admission(run.run_id, manifest.owner, manifest.admission, records),
            logs=VolunteerLogs(run.volunteers, run.run_id, manifest, records),
        )
