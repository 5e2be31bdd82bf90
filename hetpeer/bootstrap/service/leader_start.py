"""Start of a term: state that follows from the log, which may be long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpeer.bootstrap.admission.admission import Admission
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.volunteer_log_files import VolunteerLogs
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.service.core_interface import Core, new_core
from hetpeer.bootstrap.state.core_config import coordinator_config
from hetpeer.bootstrap.state.placement_policies import DEFAULT


@dataclass(frozen=True, slots=True)
class LeaderStart:
    """The core, the admission rules and the volunteers' logs at the start of a term."""

    core: Core
    admission: Admission
    logs: VolunteerLogs

    @classmethod
    def of(
        cls, run: RunDirectory, records: Sequence[Record], now: float, *, placement: str | None = DEFAULT
    ) -> LeaderStart:
        """The start that follows from `records`, at `now`. `placement`: policy by which places are compared
        for newcomers; None: they are not.

        To be called in a thread: a log of months takes seconds, and a leader that sends no heartbeats is
        deposed.
        """
        manifest = run.manifest
        return cls(
            core=new_core(coordinator_config(run, placement=placement), manifest.averaging, records, now),
            admission=Admission(run.run_id, manifest.owner, manifest.admission, records),
            logs=VolunteerLogs(run.volunteers, run.run_id, manifest, records),
        )
