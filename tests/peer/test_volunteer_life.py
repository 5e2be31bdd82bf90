"""One life of a volunteer: what its phases are called, and when who is asked to finish leaves."""

import asyncio

import pytest

from hetpeer.averaging.effects import Stop
from hetpeer.averaging.member.member import Phase
from hetpeer.dht.base.errors import ExitCode
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.peer.control.owned_daemon import Notifier
from hetpeer.peer.daemon import volunteer_life
from hetpeer.peer.daemon.owner_wishes import DaemonState, VolunteerDaemon, Wish
from hetpeer.peer.daemon.volunteer_life import _called_off, doing, rejection
from hetpeer.peer.limits.governor import Reason


class InAStep:
    """A volunteer whose step is over when the test says so."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def step_over(self) -> None:
        await self.over.wait()


@pytest.fixture
def volunteer() -> InAStep:
    return InAStep()


@pytest.fixture
def daemon() -> VolunteerDaemon:
    return VolunteerDaemon(SystemClock(), asyncio.Event(), Notifier(""))


async def calling_off(volunteer: InAStep, daemon: VolunteerDaemon) -> asyncio.Future[None]:
    """`_called_off`, waiting for what is asked."""
    waiting = asyncio.ensure_future(_called_off(volunteer, daemon))
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
    monkeypatch.setattr(volunteer_life, "FINISH_S", 0.02)
    waiting = await calling_off(volunteer, daemon)
    daemon.finish()
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
