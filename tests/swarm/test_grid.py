"""A process dies at every place of the protocol where it can (docs/faults.md): the run goes on, and counts
exactly once.

Each cell alone is for `make grid`; here several are met in one run.
"""

import asyncio
import signal
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from tests.swarm.child import Child
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

ANEW = "a new one is started"
"""Said by a volunteer whose worker died."""
VOLUNTEER = (
    "choose:1",
    "tell_claim:1",
    "prepare:1",
    "tell_prepared:1",
    "fetch_state:1",
    "tell_ready:1",
    "run_forward:9",
    "send_activation:5",
    "run_backward:7",
    "send_gradient:5",
    "tell_sealed:4",
    "tell_evaluated:1",
    "merge:2",
    "send_part:3",
    "sum_parts:3",
    "send_result:3",
    "inspect:4",
    "tell_vote:4",
    "apply_update:5",
    "record_applied:3",
    "tell_applied:3",
    "save_state:1",
    "end_step:4",
)
WORKER = (
    "worker_forward:20",
    "worker_backward:40",
    "worker_merge_slot:25",
    "worker_export_slot:30",
    "worker_sum:10",
    "worker_inspect:30",
    "worker_apply:30",
    "worker_dump_state:4",
)
COORDINATOR = (
    "save_ballot:1",
    "save_entries:6",
    "decided:6",
    "record_reign:1",
    "recorded_reign:1",
    "send_welcome:2",
    "send_granted:2",
    "send_fetch:1",
    "send_begin:5",
    "send_settled:9",
    "send_plan:5",
    "record_commit:4",
    "recorded_commit:4",
    "send_commit:5",
    "record_evaluation:1",
    "send_save:1",
    "collect_checkpoint:1",
    "record_checkpoint:1",
    "recorded_checkpoint:1",
)


async def mended(
    swarm: Swarm,
    bootstrap: Child,
    volunteers: list[Child],
    second: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Start again whoever dies, until the run is over and proves right; somebody must have died.

    `second` says where the second lives of volunteers are to end, and the coordinator's second one ends at a
    checkpoint then.
    """
    reborn = False
    while bootstrap.status != 0:
        if bootstrap.status is not None:
            assert bootstrap.status == -signal.SIGKILL, bootstrap.said
            bootstrap = await swarm.bootstrap(fail="record_checkpoint:2" if second and not reborn else "")
            reborn = True
        for place, child in enumerate(volunteers):
            if child.status == -signal.SIGKILL:
                fail = second.get(child.name, "")
                volunteers[place] = swarm.volunteer(f"{child.name}+", home=child.home, fail=fail)
        await asyncio.sleep(0.05)
    for child in volunteers:
        if not child.name.endswith("+") and ANEW not in child.said:
            assert await child.ended() == 0, child.said
        elif child.status is None:  # who comes back at the end may find nobody any more, and waits
            child.signal(signal.SIGINT)
            await child.ended()
    swarm.exact()
    assert swarm.deaths or any(ANEW in child.said for child in volunteers), "nothing died"


@pytest.mark.grid
@pytest.mark.parametrize("cell", VOLUNTEER)
async def test_a_volunteer(swarm: Swarm, cell: str) -> None:
    """One of the first two and one of the others are to die at the same place: stages reach different
    ones, and work goes to who is fast.
    """
    bootstrap = await swarm.bootstrap()
    volunteers = [
        swarm.volunteer(name, fail=f"{cell}@{swarm.folder}/{pair}") for pair in ("ab", "cd") for name in pair
    ]
    await mended(swarm, bootstrap, volunteers)


@pytest.mark.grid
@pytest.mark.parametrize("cell", WORKER)
async def test_a_worker(swarm: Swarm, cell: str) -> None:
    """That of whoever gets there first: it depends on lines who reduces, and on places who computes how
    much.
    """
    bootstrap = await swarm.bootstrap()
    volunteers = [swarm.volunteer(name, fail=f"{cell}@{swarm.folder}/died") for name in "abcd"]
    await mended(swarm, bootstrap, volunteers)
    assert any(ANEW in child.said for child in volunteers)


@pytest.mark.grid
@pytest.mark.parametrize("cell", COORDINATOR)
async def test_the_coordinator(swarm: Swarm, cell: str) -> None:
    bootstrap = await swarm.bootstrap(fail=cell)
    volunteers = [swarm.volunteer(name) for name in "abc"]
    await mended(swarm, bootstrap, volunteers)


@pytest.mark.proof
async def test_ten_deaths_in_one_run(swarm: Swarm) -> None:
    """Each dies in its first life, and somewhere else in its second."""
    bootstrap = await swarm.bootstrap(fail="recorded_commit:7")
    first = ("tell_sealed:9", "send_part:4", "tell_vote:6", "apply_update:15")
    second = ("tell_ready:1", "run_backward:9", "record_applied:2", "worker_forward:20")
    volunteers = [swarm.volunteer(name, fail=cell) for name, cell in zip("abcd", first, strict=True)]
    await mended(swarm, bootstrap, volunteers, dict(zip("abcd", second, strict=True)))
