"""What changed in a swarm, told from one status to the next."""

from dataclasses import replace

import pytest

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.discovery import Advert
from hetpeer.peer.watching.status_summary import summarise
from hetpeer.peer.watching.swarm_status import LeftoverRow, SwarmStatus
from hetpeer.peer.web.swarm_events import GRACE_S, MAX_EVENTS, SwarmEvents
from tests.bootstrap.engine import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Four blocks."""
    return make_run(tmp_path_factory.mktemp("chronicle"))


def status(run: RunDirectory, at: float, step: int = 1, **volunteers: tuple[int, int]) -> SwarmStatus:
    """A coordinator at `step`, and volunteers with these blocks."""
    adverts = {
        name: Advert(role="volunteer", state="training", name=name, block_begin=begin, block_end=end)
        for name, (begin, end) in volunteers.items()
    }
    boss = Advert(role="coordinator", state="training", step=step, loss=4.0 - step, tokens_per_second=10.0)
    return summarise(run.signed, {run.manifest.coordinators[0]: boss, **adverts}, at)


def texts(chronicle: SwarmEvents) -> list[str]:
    return [event.text for event in chronicle.events]


def test_the_first_status_is_no_event(run: RunDirectory) -> None:
    chronicle = SwarmEvents()
    chronicle.add(status(run, 0.0, ada=(0, 4)))
    assert texts(chronicle) == []
    assert chronicle.speed.points == [(0.0, 10.0)]


def test_who_comes_takes_other_blocks_and_goes(run: RunDirectory) -> None:
    chronicle = SwarmEvents()
    chronicle.add(status(run, 0.0, ada=(0, 4)))
    chronicle.add(status(run, 1.0, ada=(0, 4), bob=(0, 2)))
    chronicle.add(status(run, 2.0, ada=(0, 4), bob=(2, 4)))
    chronicle.add(status(run, 3.0, ada=(0, 4)))
    assert texts(chronicle) == ["bob joined (volunteer)", "bob took blocks 2-3"]
    chronicle.add(status(run, 2.0 + GRACE_S + 0.1, ada=(0, 4)))
    assert texts(chronicle)[2:] == ["bob was lost"]


def test_who_takes_leave_is_gone_at_once(run: RunDirectory) -> None:
    chronicle = SwarmEvents()
    for at in (0.0, 1.0):
        chronicle.add(status(run, at, ada=(0, 4), bob=(0, 2)))
    later = status(run, 2.0, ada=(0, 4), bob=(0, 2))
    rows = tuple(row for row in later.peers if row.name != "bob")
    (bob,) = (row.peer for row in later.peers if row.name == "bob")
    for at in (2.0, 3.0):
        chronicle.add(replace(later, time=at, peers=rows, left=(bob,)))
    assert texts(chronicle) == ["bob left"]


def test_a_block_without_a_holder_is_grave(run: RunDirectory) -> None:
    chronicle = SwarmEvents()
    chronicle.add(status(run, 0.0, ada=(0, 4)))
    chronicle.add(status(run, 1.0, ada=(0, 3)))
    assert [(event.text, event.grave) for event in chronicle.events] == [
        ("ada took blocks 0-2", False),
        ("the run is waiting: nobody holds block 3", True),
    ]


def test_a_run_that_goes_back_is_grave(run: RunDirectory) -> None:
    chronicle = SwarmEvents()
    for step in (1, 2, 3):
        chronicle.add(status(run, step, step, ada=(0, 4)))
    chronicle.add(status(run, 4.0, 2, ada=(0, 4)))
    assert texts(chronicle) == ["back from step 3 to step 2"]
    assert chronicle.events[-1].grave


def test_a_step_that_is_reduced_is_no_event(run: RunDirectory) -> None:
    chronicle = SwarmEvents()
    plain = status(run, 0.0, ada=(0, 4))
    for now, state in enumerate(("training", "reducing", "training", "finished")):
        chronicle.add(replace(plain, time=now, state=state))
    assert texts(chronicle) == ["the run is finished"]


def test_leftovers_are_told_once(run: RunDirectory) -> None:
    chronicle = SwarmEvents()
    plain = status(run, 0.0, ada=(0, 4))
    left = LeftoverRow(block=2, sender="ada", step=1, microbatches=3)
    for now, leftovers in ((0.0, ()), (1.0, (left,)), (2.0, (left,)), (3.0, ())):
        chronicle.add(replace(plain, time=now, leftovers=leftovers))
    assert texts(chronicle) == [
        "3 microbatches wait for a volunteer that can compute them",
        "the unfinished work is done",
    ]


def test_events_are_bounded(run: RunDirectory) -> None:
    chronicle = SwarmEvents()
    for now in range(MAX_EVENTS + 50):
        chronicle.add(status(run, now, ada=(0, 2 + now % 2), bob=(0, 4)))
    assert len(chronicle.events) == MAX_EVENTS
