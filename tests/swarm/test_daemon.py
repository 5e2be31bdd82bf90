"""A volunteer that its owner talks to: paused, resumed, told to finish or to stop, and put to sleep with
its machine.
"""

import signal
import stat
from pathlib import Path

import psutil
import pytest

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.control.control_client import ask, connected
from hetpeer.peer.control.control_messages import ControlRequest, DaemonStatus
from tests.swarm.child import LEAVE_S, Child, until
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


def told(child: Child, do: str, **more: float) -> DaemonStatus:
    return ask(child.home, ControlRequest(do=do, **more))


async def answers(child: Child) -> None:
    """Return when its daemon can be talked to."""

    def there() -> bool:
        try:
            return bool(told(child, "status"))
        except LocalError:
            return False

    await until(there, f"{child.name} answers")


async def does(child: Child, state: str, reason: str = "", within_s: float = 30.0) -> None:
    await until(
        lambda: (told(child, "status").state, told(child, "status").reason) == (state, reason),
        lambda: f"{child.name} is {state} ({reason}): {told(child, 'status')}",
        within_s,
    )


def shows(child: Child, *, at_work: bool) -> None:
    """What `hetpeer status` shows of it is its own, and nothing of a life that is over."""
    figures = told(child, "status").figures
    assert figures is not None
    assert (figures.pid, figures.steps) == (child.pid, 100_000)
    assert (figures.microbatches > 0, figures.blocks is not None) == (at_work, at_work)


def seen(onlooker: Child) -> list[tuple[str, str]]:
    """Who does what, as `hetpeer status --watch --json` has shown last."""
    return [(peer["name"], peer["state"]) for peer in onlooker.shown.get("peers", ())]


def shared_kib(child: Child) -> int:
    """What it has of the memory that daemon and worker share."""
    lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem"))


async def given_back(worker: psutil.Process) -> None:
    """Return when it is gone; from when it stands still until then it takes no processor time."""
    used: float | None = None

    def gone() -> bool:
        nonlocal used
        try:
            if worker.status() == psutil.STATUS_STOPPED:
                now = worker.cpu_times().user
                used = now if used is None else used
                assert now < used + 0.1  # of its threads each stops by itself
        except psutil.NoSuchProcess:
            return True
        return not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE

    await until(gone, "the worker is gone", LEAVE_S)


@pytest.mark.proof
async def test_paused_in_training_resumed_and_finished(swarm: Swarm) -> None:
    """The run goes on without it meanwhile, and every microbatch counts once. Then its machine sleeps."""
    one, volunteers = await swarm.without_end(before="sleepy")
    await does(one, "training")
    await until(lambda: swarm.lives(one) == 1, "its first life")
    assert stat.S_IMODE((one.home / "control.sock").stat().st_mode) == 0o600
    shows(one, at_work=True)

    worker = one.helpers()["worker"]
    assert shared_kib(one) > 0
    pausing = swarm.start("owner", "pause", home=one.home)
    await given_back(worker)
    assert await pausing.ended() == ExitCode.OK, pausing.said
    assert pausing.printed.startswith("paused (user) since ")
    assert (await swarm.gone(one))["why"] == "said farewell"
    await swarm.committed(swarm.version + 2)
    assert "fenced" not in one.said
    assert "worker" not in one.helpers()
    shows(one, at_work=False)
    await until(
        lambda: shared_kib(one) == 0,
        lambda: f"{shared_kib(one)} KiB of the arena are given back",
    )
    looking = swarm.start("onlooker", "status", "--watch", "--json", home=one.home)
    await until(lambda: (one.name, "paused") in seen(looking), lambda: f"its advert says so: {seen(looking)}")
    assert (looking.shown["here"]["state"], looking.shown["here"]["reason"]) == ("paused", "user")
    looking.signal(signal.SIGTERM)
    assert await looking.ended() == ExitCode.TERMINATED, looking.said

    told(one, "resume")
    await until(lambda: swarm.lives(one) == 2, "it works again")

    p2pd = one.helpers()["p2pd"]
    (one.home / "slept").touch()
    await one.says("this machine slept for 3600 s")
    await until(lambda: one.helpers().get("p2pd", p2pd).pid != p2pd.pid, "a new p2pd")
    await until(lambda: swarm.lives(one) == 3, "it works again after the sleep")

    assert told(one, "finish").state == "draining"
    assert await one.ended() == ExitCode.OK
    assert "left the run" in one.said
    assert not (one.home / "control.sock").exists()
    await swarm.left_in_order([v for v in volunteers if v is not one])


async def test_paused_before_it_works(swarm: Swarm) -> None:
    """Paused while it starts and while its worker does; what is asked of it then; and a pause that ends by
    itself.
    """
    training = swarm.run.manifest.training.model_copy(update={"steps": 100_000})
    swarm.run = resign(swarm.run, training=training)  # nobody ends because the run does
    await swarm.bootstrap()
    early, lonely = swarm.volunteer("early"), swarm.volunteer("lonely")
    patient = swarm.volunteer("patient", before="second_worker_is_mute")
    await answers(early)
    assert told(early, "pause").state == "paused"
    assert told(early, "pause", for_s=3600.0).until is not None  # from now on
    assert told(early, "pause").until is None
    await early.says("paused (user)")
    assert "worker" not in early.helpers()
    early.signal(signal.SIGTERM)
    assert await early.ended(LEAVE_S) == ExitCode.OK

    await does(lonely, "training")
    told(lonely, "pause")
    told(lonely, "finish")
    assert await lonely.ended(LEAVE_S) == ExitCode.OK

    told(patient, "resume")  # it is not paused
    told(patient, "pause")
    await patient.says("paused (user)")
    told(patient, "pause", for_s=1.0)
    await patient.says("resumed")
    await does(patient, "checking")
    told(patient, "pause")
    await until(lambda: "worker" not in patient.helpers(), "the new worker is gone")
    await until(lambda: patient.said.count("paused (user)") == 2, "it pauses again")
    with connected(patient.home) as daemon:
        assert daemon.ask(ControlRequest(do="stop")).state == "draining"
        assert daemon.ended(LEAVE_S)
    assert await patient.ended(LEAVE_S) == ExitCode.OK
    late = swarm.start("late", "resume", home=patient.home)
    assert await late.ended() == ExitCode.NOT_RUNNING
    assert late.said.startswith("HP-CTL-001: ")
    assert late.said.count("\n") == 1
