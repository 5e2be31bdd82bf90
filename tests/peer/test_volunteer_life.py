"""One life of a volunteer: what its phases are called, and when who is asked to finish leaves.

What a machine offers: its RAM, or what a GPU has less than that.
"""

import asyncio
import math

import psutil
import pytest

from hetpeer.averaging.effects import Stop
from hetpeer.averaging.member.member_life import Phase
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.peer.control.owned_daemon import Notifier
from hetpeer.peer.daemon import leaving, machine_offer
from hetpeer.peer.daemon.leaving import called_off, rejection
from hetpeer.peer.daemon.machine_offer import (
    GROWTH_BYTES,
    P2PD_BYTES,
    OwnersLimits,
    computes_on,
    device_offered,
    main_memory,
    rate_offered,
)
from hetpeer.peer.daemon.owner_wishes import DaemonState, VolunteerDaemon, Wish
from hetpeer.peer.daemon.volunteer_life import (
    doing,
)
from hetpeer.peer.limits.amounts import bytes_text
from hetpeer.peer.limits.governor import Reason
from hetpeer.peer.training.volunteer_figures import MainMemory
from hetpeer.stages.block.device import HostResources
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.ipc.worker_messages import WorkerInfo
from hetpeer.stages.pipeline.place_memory import Offered


class InAStep:
    """A volunteer whose step is over when the test says so."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.handed_over = asyncio.Event()
        self.handed_over.set()
        self.session = self
        self.trouble: LocalError | None = None
        self.full = asyncio.Event()

    async def out_of_room(self) -> None:
        await self.full.wait()

    async def farewell(self, within_s: float) -> None:
        assert within_s > 0.0
        await self.handed_over.wait()

    async def step_over(self) -> None:
        await self.over.wait()


@pytest.fixture
def volunteer() -> InAStep:
    return InAStep()


@pytest.fixture
def daemon() -> VolunteerDaemon:
    return VolunteerDaemon(SystemClock(), asyncio.Event(), Notifier(""))


async def calling_off(volunteer: InAStep, daemon: VolunteerDaemon) -> asyncio.Future[None]:
    """`called_off`, waiting for what is asked."""
    waiting = asyncio.ensure_future(called_off(volunteer, daemon))
    await turns()
    assert not waiting.done()
    return waiting


async def turns() -> None:
    """Whoever can go on does."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_finishes_stops_with_the_step(volunteer: InAStep, daemon: VolunteerDaemon) -> None:
    waiting = await calling_off(volunteer, daemon)
    daemon.finish()
    await turns()
    assert not waiting.done()
    assert daemon.wish is Wish.FINISH
    volunteer.over.set()
    await asyncio.wait_for(waiting, 5.0)
    assert daemon.wish is Wish.STOP


async def test_a_step_that_does_not_end_is_left(
    volunteer: InAStep, daemon: VolunteerDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "FINISH_S", 0.02)
    waiting = await calling_off(volunteer, daemon)
    daemon.finish()
    await asyncio.wait_for(waiting, 5.0)
    assert daemon.wish is Wish.STOP


async def test_a_volunteer_that_finishes_stays_until_its_state_is_handed_over(
    volunteer: InAStep, daemon: VolunteerDaemon
) -> None:
    volunteer.handed_over.clear()
    volunteer.over.set()
    waiting = await calling_off(volunteer, daemon)
    daemon.finish()
    await turns()
    assert (waiting.done(), daemon.wish) == (False, Wish.FINISH)
    volunteer.handed_over.set()
    await asyncio.wait_for(waiting, 5.0)
    assert daemon.wish is Wish.STOP


@pytest.mark.parametrize("asked", [VolunteerDaemon.stop, lambda daemon: daemon.hold(Reason.USER)])
async def test_who_finishes_may_be_asked_for_more(
    volunteer: InAStep, daemon: VolunteerDaemon, asked: object
) -> None:
    waiting = await calling_off(volunteer, daemon)
    daemon.finish()
    await turns()
    asked(daemon)
    await asyncio.wait_for(waiting, 5.0)
    assert daemon.wish is Wish.STOP


async def test_a_volunteer_whose_disk_is_full_hands_over_and_says_why(
    volunteer: InAStep, daemon: VolunteerDaemon
) -> None:
    volunteer.handed_over.clear()
    waiting = await calling_off(volunteer, daemon)
    volunteer.trouble = LocalError("HP-DISK-002", "the disk is full", why="no room", fix="make room")
    volunteer.full.set()
    await turns()
    assert not waiting.done()
    volunteer.handed_over.set()
    assert await asyncio.wait_for(waiting, 5.0) is volunteer.trouble


async def test_a_pause_waits_for_nothing(volunteer: InAStep, daemon: VolunteerDaemon) -> None:
    waiting = await calling_off(volunteer, daemon)
    daemon.hold(Reason.BATTERY)
    await asyncio.wait_for(waiting, 5.0)
    assert daemon.wish is Wish.PAUSE


def test_every_phase_is_a_state() -> None:
    in_touch = {phase: doing(phase, in_touch=True) for phase in Phase}
    assert in_touch[Phase.PREPARING] == in_touch[Phase.SYNCING] == (DaemonState.SYNCING, "")
    assert in_touch[Phase.READY] == (DaemonState.WAITING, "no_peers")
    assert in_touch[Phase.APPLYING] == (DaemonState.TRAINING, "")
    assert in_touch[Phase.STOPPED] == (DaemonState.STOPPED, "")
    assert doing(Phase.JOINING, in_touch=False) == (DaemonState.JOINING, "no_coordinator")
    assert doing(Phase.TRAINING, in_touch=False) == (DaemonState.WAITING, "no_coordinator")
    assert doing(Phase.READY, in_touch=True, spared=True) == (DaemonState.WAITING, "backup")
    assert doing(Phase.READY, in_touch=False, spared=True) == (DaemonState.WAITING, "no_coordinator")


@pytest.mark.parametrize(
    ("reason", "code", "status"),
    [
        ("version", "HP-RUN-002", ExitCode.VERSION),
        ("banned", "HP-RUN-019", ExitCode.RUN_CLOSED),
        ("uninvited", "HP-RUN-020", ExitCode.RUN_CLOSED),
        ("work", "HP-RUN-021", ExitCode.VERSION),
        ("crowded", "HP-RUN-022", ExitCode.TRY_LATER),
        ("", "HP-RUN-010", ExitCode.RUN_CLOSED),
    ],
)
def test_why_we_may_not_take_part(reason: str, code: str, status: ExitCode) -> None:
    error = rejection(Stop("the reason", completed=False, rejected=reason))
    assert (error.code, error.why, error.exit_code) == (code, "the reason", status)


MIB, GIB = 1 << 20, 1 << 30


def worker(device: str, free: float, total: float, held: float = 0.0, threads: int = 1) -> WorkerInfo:
    """Memory in GiB."""
    return WorkerInfo(
        device=device,
        device_name="cpu" if device == "cpu" else "A10",
        device_uuid="" if device == "cpu" else "GPU-1",
        arithmetic="",
        threads=threads,
        rss_bytes=0,
        device_bytes=int(held * GIB),
        device_free_bytes=int(free * GIB),
        device_total_bytes=int(total * GIB),
        blocks=(),
        tasks=0,
        gpus=0,
    )


@pytest.mark.parametrize(
    ("free", "total", "held", "share", "offered"),
    [
        (5.5, 6.0, 0.0, 1.0, 5.2),  # 0.3 GiB for what no plan counts
        (4.5, 6.0, 1.0, 1.0, 5.2),  # what torch keeps after its warm-up it uses again
        (5.5, 6.0, 0.0, 0.5, 2.7),
        (2.0, 6.0, 0.0, 0.5, 1.7),  # somebody else has the rest
        (1.75, 2.0, 0.0, 1.0, 1.5),  # a quarter of a GiB at least
    ],
)
def test_on_a_gpu_what_is_free_there(
    free: float, total: float, held: float, share: float, offered: float
) -> None:
    found = device_offered(worker("cuda:0", free, total, held), share)
    assert math.isclose(found / GIB, offered, abs_tol=1e-6)


def test_a_gpu_without_memory_offers_next_to_none() -> None:
    """Not nothing, which would mean that it is not known."""
    assert device_offered(worker("cuda:0", 0.1, 6.0), 1.0) == 1


def test_the_program_itself_takes_its_part_of_the_limit() -> None:
    info = worker("cpu", 1.0, 2.0)
    main = main_memory(4 * GIB, [info])
    held = psutil.Process().memory_info().rss
    assert abs(main.program - info.rss_bytes - P2PD_BYTES - GROWTH_BYTES - held) < 16 * MIB
    assert main.for_model == 4 * GIB - main.program
    assert str(main) == f"of 4 GiB the program itself takes {bytes_text(main.program)}"


@pytest.mark.parametrize(
    ("ram", "free", "found", "wanted"),
    [("4GiB", 5, 4, 4), ("4GiB", 3, 3, 4), ("50%", 3, 1.5, 0), ("100%", 3, 3, 0)],
)
def test_no_more_main_memory_is_offered_than_is_free(
    monkeypatch: pytest.MonkeyPatch, ram: str, free: int, found: float, wanted: int
) -> None:
    survey = HostResources(ram_bytes=8 * GIB, ram_free_bytes=free * GIB, cores=1)
    monkeypatch.setattr(machine_offer.device, "survey", lambda: survey)
    limits = OwnersLimits(ram=ram, gpu_memory="50%", disk="1GiB", offload="disk")
    assert limits.ram_bytes() == int(found * GIB)
    assert limits.ram_wanted() == wanted * GIB


def test_a_limit_below_what_the_program_takes_is_refused() -> None:
    info = worker("cpu", 1.0, 2.0)
    with pytest.raises(LocalError, match="HP-MEM-004") as caught:
        main_memory(P2PD_BYTES + GROWTH_BYTES, [info])
    assert "--ram-limit" in caught.value.fix
    assert "before they hold anything of a model" in caught.value.why


@pytest.mark.parametrize(
    ("info", "offered"),
    [
        (worker("cpu", 1.0, 2.0), Offered(device=int(3.75 * GIB), disk=GIB, kinds=(Offload.DISK,))),
        (
            worker("cuda:0", 9.0, 10.0),
            Offered(device=int(4.5 * GIB), host=int(3.75 * GIB), disk=GIB, kinds=(Offload.DISK,)),
        ),
    ],
)
def test_device_main_memory_and_disk_are_offered_within_the_owners_limits(
    info: WorkerInfo, offered: Offered
) -> None:
    limits = OwnersLimits(ram="4GiB", gpu_memory="50%", disk="1GiB", offload="disk")
    assert limits.offered([info], MainMemory(limit=5 * GIB, program=GIB), GIB) == offered


@pytest.mark.parametrize(
    ("info", "host", "line"),
    [
        (
            worker("cuda:1", 21.5, 24.0, 0.5),
            GIB,
            "computes on A10, 22 GiB free; offers 512 MiB of GPU memory and 1 GiB of main memory",
        ),
        (worker("cpu", 8.0, 16.0), 0, "computes on 1 processor core; offers 512 MiB of memory"),
        (worker("cpu", 8.0, 16.0, threads=2), 0, "computes on 2 processor cores; offers 512 MiB of memory"),
    ],
)
def test_the_owner_is_told_what_computes(info: WorkerInfo, host: int, line: str) -> None:
    main = MainMemory(limit=GIB, program=600 * MIB)
    said = computes_on([info], main, Offered(device=512 * MIB, host=host))
    assert said == f"{line} (of 1 GiB the program itself takes 600 MiB)"


def test_an_uplink_is_offered_as_it_was_measured_and_within_its_limit() -> None:
    assert rate_offered(0.0, math.inf) == 0.0
    assert rate_offered(2e6, math.inf) == 2e6
    assert rate_offered(2e6, 1e6) == 1e6
    assert rate_offered(0.0, 1e6) == 1e6
