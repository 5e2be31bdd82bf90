"""The planner beside a grouped run in which no cluster lives: who waits at two looks is divided."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.grouped.formation import Formation
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import AveragingSettings
from hetpeer.bootstrap.run.step_workload import of_manifest
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.dht.discovery import CHECKING, Advert, Roster
from hetpeer.peer.reliable import cluster_proposer, plan_proposer
from hetpeer.peer.reliable.plan_proposer import PlanProposer
from tests.bootstrap.clustered import Waiting
from tests.bootstrap.engine import make_run

HALVES = ((0, 2), (2, 4))
WORST = ("slow 1", "fast 1", "slow 2", "fast 2", "slow 3", "fast 3", "slow 4", "fast 4")
"""By arrival each fast one would wait for a slow one with as many blocks."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("founding"))


class Gathered:
    """Volunteers in two halves, none of which holds the model alone, and the planner that looks at them."""

    def __init__(self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        work = of_manifest(run.manifest, run.manifest.training.microbatches)
        room = int(0.45 * (work.memory.sum() + 8 * work.kept.sum()))
        self.peers = [name.replace(" ", "-") for name in names]
        self.run = Waiting(layout=HALVES, gather_s=10.0).comes(*self.peers)
        self.adverts = {
            peer: Advert(
                role="volunteer",
                memory_bytes=room,
                flops_per_second=4e6 if peer.startswith("fast") else 1e6,
                uplink=12.5e6,
            )
            for peer in self.peers
        }
        self.formed: list[Formation] = []
        manifest = run.manifest.model_copy(update={"averaging": AveragingSettings()})
        service = SimpleNamespace(core=self.run.core, form=self._form, expect=self.run.core.expect)
        self.service = cast("CoordinatorService", service)
        roster = cast("Roster", SimpleNamespace(read=self.read))
        self.planner = PlanProposer(manifest, roster, lambda: None, cast("Any", None))

        async def inline(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            left = iter(range(400))
            return call(*arguments, **named | {"on": lambda: next(left, None) is not None})

        monkeypatch.setattr(plan_proposer.asyncio, "to_thread", inline)

    async def read(self) -> dict[str, Advert]:
        return self.adverts

    def _form(self, formation: Formation) -> None:
        self.formed.append(formation)
        self.run.do(self.run.core.form(formation, self.run.now))

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            await self.planner._clusters.look(self.service, self.run.core)


async def test_eight_in_the_worst_order_are_divided_before_any_cluster_is_founded(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Gathered(run, monkeypatch, *WORST)
    await here.look()
    assert here.formed == [], "perhaps others are about to come"
    await here.look()
    (formation,) = here.formed
    assert formation.spared == frozenset()
    for seats in formation.clusters:
        blocks = {peer.partition("-")[0]: end - begin for peer, (begin, end) in seats}
        assert len(blocks) == 1 or blocks["slow"] < blocks["fast"]
    for peer in here.peers:
        here.run.tell(peer, m.Prepared())
    assert len(here.run.founded) == len(formation.clusters) == 4
    await here.look(2)
    assert len(here.formed) == 1


async def test_nobody_is_divided_before_all_have_said_how_fast_they_are(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Gathered(run, monkeypatch, *WORST)
    late = here.adverts.pop("fast-4")
    await here.look(3)
    assert here.formed == []
    assert here.run.founded == []
    here.adverts["fast-4"] = late
    await here.look()
    assert len(here.formed) == 1


async def test_who_comes_while_the_planner_searches_is_divided_with_the_others(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Gathered(run, monkeypatch, *WORST[:-1])
    await here.look()
    newcomer = here.adverts["fast-1"]

    async def read() -> dict[str, Advert]:
        if "fast-9" not in here.adverts:
            here.run.comes("fast-9")
            here.adverts["fast-9"] = newcomer
        return here.adverts

    here.planner._roster = cast("Roster", SimpleNamespace(read=read))
    await here.look()
    assert here.formed == []
    await here.look(2)
    (formation,) = here.formed
    assert "fast-9" in formation.peers


async def test_the_first_waits_for_those_that_are_being_checked(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their adverts say so. The first could hold the model alone."""
    here = Gathered(run, monkeypatch, "fast 1")
    work = of_manifest(run.manifest, run.manifest.training.microbatches)
    room = int(1.1 * (work.memory.sum() + 8 * work.kept.sum()))
    here.adverts = {"fast-1": here.adverts["fast-1"].model_copy(update={"memory_bytes": room})}
    here.adverts |= {"other": Advert(role="volunteer", state=CHECKING), "node": Advert(role="coordinator")}
    await here.look(2)
    here.run.tell("fast-1", m.Prepared())
    here.run.passes(5.0, "fast-1")
    assert len(here.formed) == 1
    assert here.run.founded == []
    del here.adverts["other"]
    monkeypatch.setattr(cluster_proposer, "ARRIVES_S", 0.0)
    await here.look()
    here.run.passes(1.0, "fast-1")
    assert len(here.run.founded) == 1
