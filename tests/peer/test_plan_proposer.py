"""The planner beside a coordinator: it waits for steps that it can compare, and promises by them."""

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.bootstrap.state.membership import BlockDemand
from hetpeer.dht.discovery import Advert, LinkNote, Roster
from hetpeer.peer.planning.asked_lines import Line
from hetpeer.peer.reliable import plan_proposer
from hetpeer.peer.reliable.plan_proposer import PlanProposer
from hetpeer.peer.reliable.proposal_timing import SETTLED_S
from hetpeer.stages.pipeline.place_memory import PlaceDemand
from tests.bootstrap.court import Court
from tests.bootstrap.engine import make_run

HALVES = (((0, 2), (2, 4)),)
PEERS = ("fast", "slow")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("proposer"))


class Swarm:
    """A coordinator of two volunteers with equal halves, of which one is a hundred times as fast."""

    def __init__(self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        cost = BlockDemand(elements=10, memory=PlaceDemand(activations=1), flops=1.0)
        self.court = Court(steps=steps, layouts=HALVES, costs=[cost] * 4, checkpoint_every=1000).begin(*PEERS)
        self.found: list[Arrangement] = []
        adverts = {
            peer: Advert(role="volunteer", memory_bytes=1 << 30, flops_per_second=flops, uplink=12.5e6)
            for peer, flops in zip(PEERS, (1e7, 1e5), strict=True)
        }

        async def read() -> dict[str, Advert]:
            return adverts

        training = run.manifest.training.model_copy(update={"steps": steps})
        self.service = cast(
            "CoordinatorService", SimpleNamespace(core=self.court.core, arrange=self.found.append)
        )
        manifest = run.manifest.model_copy(update={"training": training})
        self.asked: list[Line] = []

        async def measure(lines: Collection[Line]) -> dict[tuple[str, str], LinkNote]:
            self.asked += lines
            return {}

        roster = cast("Roster", SimpleNamespace(read=read))
        self.planner = PlanProposer(manifest, roster, lambda: None, measure)
        monkeypatch.setattr(plan_proposer, "time", SimpleNamespace(monotonic=lambda: self.court.now))

        async def inline(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            left = iter(range(400))
            return call(*arguments, **named | {"on": lambda: next(left, None) is not None})

        monkeypatch.setattr(plan_proposer.asyncio, "to_thread", inline)

    async def step(self, seconds: float) -> None:
        """A step, and a look at its end."""
        for _ in range(round(seconds)):
            for peer in PEERS:
                self.court.tell(peer, m.Heartbeat())
            self.court.now += 1.0
        self.court.commit(*PEERS)
        await self.planner._look(self.service, self.court.core)


async def test_nothing_is_proposed_before_two_full_steps_and_the_promise_is_by_them(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = Swarm(run, monkeypatch, steps=1000)
    await swarm.planner._look(swarm.service, swarm.court.core)
    for _ in range(3):
        assert swarm.found == []
        await swarm.step(2 * SETTLED_S)
    (found,) = swarm.found
    assert found.promise is not None
    assert found.promise.before_s == pytest.approx(2 * SETTLED_S)
    assert found.promise.after_s < found.promise.before_s
    assert swarm.asked == [], "one volunteer alone needs no line"


async def test_late_in_a_run_all_stays(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step is under way, and none is left behind it."""
    swarm = Swarm(run, monkeypatch, steps=4)
    await swarm.planner._look(swarm.service, swarm.court.core)
    for _ in range(3):
        await swarm.step(2 * SETTLED_S)
    assert swarm.found == []
