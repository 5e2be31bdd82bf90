"""A volunteer's offer and credentials, and figures of what it has done so far: steps, pieces of work, and
shares of the worker's time.
"""

from __future__ import annotations

import hmac
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hetpeer.averaging.member.work_in_progress import WorkerOccupation
from hetpeer.peer.limits.amounts import bytes_text
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.pipeline.place_memory import Offered

RECENT = 9
"""Steps of which the middle one says how long it is from the last work to the update."""
SPEED_S = 5.0
"""Least seconds over which a speed is measured."""

MARK = 12
"""Hexadecimal digits of the mark of a processor."""
RECENT_S = 60.0
"""Time constant of recent shares: seconds after which a moment's weight has fallen to 1/e."""


class OccupationShares:
    """Shares of the worker's time by occupation, in all and recently."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(WorkerOccupation, 0.0)
        """Seconds since the first `note`."""
        self._lately = dict.fromkeys(WorkerOccupation, 0.0)
        self._now: WorkerOccupation | None = None
        self._since = 0.0

    def note(self, occupation: WorkerOccupation, now: float) -> tuple[WorkerOccupation, float] | None:
        """Begin `occupation` at `now`. Returns the one before and its start, or None if nothing changes."""
        before, since = self._now, self._since
        if occupation is before:
            return None
        self._count(now)
        self._now, self._since = occupation, now
        return None if before is None else (before, since)

    def _count(self, now: float) -> None:
        if self._now is None:
            return
        passed = max(now - self._since, 0.0)
        self.seconds[self._now] += passed
        kept = math.exp(-passed / RECENT_S)
        self._lately = {one: kept * share for one, share in self._lately.items()}
        self._lately[self._now] += 1.0 - kept

    def lately(self, now: float) -> Mapping[WorkerOccupation, float]:
        """Shares of about the last minute, which add up to 1; all 0 before the first `note`."""
        self._count(now)
        self._since = max(self._since, now)
        total = sum(self._lately.values())
        return {one: share / total for one, share in self._lately.items()} if total else dict(self._lately)


@dataclass(frozen=True, slots=True, kw_only=True)
class MainMemory:
    """Main memory that the owner allows, and its division, in bytes.

    str(MainMemory(limit=4 << 30, program=600 << 20))  # of 4.0 GiB the program itself takes 600 MiB
    """

    limit: int = 0
    program: int = 0
    """Bytes that daemon, worker and p2pd take without anything of a model."""

    @property
    def for_model(self) -> int:
        """For a place and for tensors on their way."""
        return max(self.limit - self.program, 0)

    def __str__(self) -> str:
        return f"of {bytes_text(self.limit)} the program itself takes {bytes_text(self.program)}"


@dataclass(frozen=True, slots=True)
class ProcessorPart:
    """The processor or GPU that a worker computes on, and the part of it that it takes meanwhile, 0…1."""

    key: str = ""
    """An id of it that does not leave this machine; empty: unknown."""
    part: float = 0.0

    def mark(self, run: str) -> str:
        """A mark that all workers on it have in common in `run`, and nowhere else; empty if it is unknown.

        >>> ProcessorPart("a boot id", 0.5).mark("a run")
        '4a032d521fd6'
        """
        return hmac.new(self.key.encode(), run.encode(), "sha256").hexdigest()[:MARK] if self.key else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The resources that this machine offers."""

    memory: Offered
    """What a place may take."""
    main: MainMemory = MainMemory()
    flops_per_second: float = 0.0
    """FLOP/s of all devices together, in products of large matrices."""
    rooms: tuple[int, ...] = ()
    """Bytes that a place may take on each device; empty: there is one."""
    beside_gpus: int = 0
    """Bytes of these that are main memory beside a GPU."""
    gpu_bytes: int = 0
    """Bytes of these that are memory of GPUs; 0: the processor computes."""
    speeds: tuple[float, ...] = ()
    """FLOP/s of each device; empty: there is one."""
    uplink: float = 0.0
    """Bytes/s of the uplink, within the limits, as measured before; 0: not known."""
    downlink: float = 0.0
    """The same of the downlink."""
    name: str = ""
    arithmetic: str = ""
    """Text on all that decides the last bits of the worker's numbers (stages/block/arithmetic.py)."""
    choice: str = "auto"
    """Kinds of offload that the owner allows, as set."""
    processor: ProcessorPart = ProcessorPart()
    """The processor on which it computes, if others may do so, too."""

    @property
    def rooms_of_devices(self) -> tuple[int, ...]:
        """Bytes that a place may take on each device."""
        return self.rooms or (self.memory.device,)

    @property
    def speeds_of_devices(self) -> tuple[float, ...]:
        """FLOP/s of each device."""
        return self.speeds or (self.flops_per_second,)

    def hello_fields(self) -> dict[str, Any]:
        """The fields of a hello or an advert that say what the machine offers to a place."""
        memory = self.memory
        return {
            "memory_bytes": memory.device,
            "host_bytes": memory.host,
            "disk_bytes": memory.disk,
            "offload": self.choice,
        }


def memory_text(offered: Offered) -> str:
    """`7.2 GiB of GPU memory and 12 GiB of main memory`."""
    if not offered.apart:
        return f"{bytes_text(offered.device)} of memory"
    return f"{bytes_text(offered.device)} of GPU memory and {bytes_text(offered.host)} of main memory"


def offload_text(kind: Offload, *, apart: bool) -> str:
    """Where that kind of offload keeps what only the update needs, in words."""
    match kind:
        case Offload.NONE:
            return f"optimizer in {'GPU memory' if apart else 'memory'}"
        case Offload.HOST:
            return "optimizer in main memory"
        case Offload.DISK:
            return "optimizer on the disk"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials for admission to a run: a voucher and a proof of work; empty where there is none."""

    voucher: bytes = b""
    work: bytes = b""


class WorkRate:
    """Pieces of work per second, from one look to the next. Pure; times are given, in seconds."""

    def __init__(self) -> None:
        self._done = 0
        self._since: float | None = None
        self._known = 0.0

    def done(self, now: float) -> None:
        """Count one more. The first one only sets the beginning: how long it took is unknown."""
        if self._since is None:
            self._since = now
        else:
            self._done += 1

    def at(self, now: float) -> float:
        """A second, since somebody looked last, but over SPEED_S at least; 0 before that."""
        if self._since is not None and now - self._since >= SPEED_S:
            self._known = self._done / (now - self._since)
            self._done, self._since = 0, now
        return self._known


@dataclass(slots=True)
class VolunteerFigures:
    """Figures for the volunteer's own progress line and its advert."""

    microbatches: int = 0
    """Block ranges run forward and backward here."""
    speed: WorkRate = field(default_factory=WorkRate)
    """Rate of those, per second."""
    credited: int = 0
    """Samples x blocks of ours that commits counted (docs/credit.md); after a roll-back some count again."""
    shares: OccupationShares = field(default_factory=OccupationShares)
    """Shares of time in which the worker computes, or waits, by reason."""
    _worked_at: dict[int, float] = field(default_factory=dict)
    """Step that is not over → when something was last done for it."""
    _updated_at: float = 0.0
    _pauses: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def worked(self, step: int, now: float) -> None:
        """A microbatch of `step` has been run forward and backward, `now` in seconds."""
        self.microbatches += 1
        self.speed.done(now)
        self._worked_at[step] = now

    def updated(self, step: int, now: float) -> None:
        """`step` is over: its update is made. It could not be decided on before the one before it was."""
        if step in self._worked_at:
            self._pauses.append(now - max(self._worked_at[step], self._updated_at))
        self._updated_at = now
        self._worked_at = {later: at for later, at in self._worked_at.items() if later > step}

    @property
    def between_s(self) -> float:
        """Seconds from the last work of a step here to its update; 0: not known."""
        return median(self._pauses) if self._pauses else 0.0
