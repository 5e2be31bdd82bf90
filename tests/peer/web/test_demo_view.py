"""All that the page shows: the newest loss beside what the log said some seconds ago; and the daemon,
whether the swarm answers or not.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from hetpeer.bootstrap.run.manifest import Manifest, validated
from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.discovery import Advert
from hetpeer.peer.watching.status_summary import summarise
from hetpeer.peer.watching.swarm_status import Progress
from hetpeer.peer.web import page_view
from hetpeer.peer.web.machine_load import LoadMeter
from hetpeer.peer.web.page_view import PageLimits, PageView, You, up_to_now
from tests.bootstrap.test_manifest import make_fields

SIGNED: Any = SimpleNamespace(manifest=validated(Manifest, make_fields()), run_id="r", reliable=())
CURVE = [(1.0, 5.0), (2.0, 4.0)]


@pytest.mark.parametrize(
    ("step", "loss", "shown"),
    [
        (3, 3.5, [*CURVE, (3, 3.5)]),
        (2, 3.5, CURVE),  # the log knows better
        (1, 3.5, CURVE),
        (3, None, CURVE),
    ],
)
def test_the_newest_point(step: int, loss: float | None, shown: list[tuple[float, float]]) -> None:
    assert up_to_now(CURVE, Progress(step=step, steps=9, loss=loss, eta_s=None)) == shown


def test_a_run_whose_log_nobody_tells() -> None:
    assert up_to_now([], Progress(step=4, steps=9, loss=1.0, eta_s=None)) == [(4, 1.0)]
    assert up_to_now([], Progress(step=0, steps=9, loss=None, eta_s=None)) == []


class Swarm:
    """What an onlooker asks; it answers when it is let."""

    def __init__(self) -> None:
        self.step = 0
        self.answers = asyncio.Event()
        self.wrong: Exception | None = None
        self.asked = 0

    async def status(self, *, ranked: bool) -> object:
        self.asked += 1
        await self.answers.wait()
        if self.wrong is not None:
            raise self.wrong
        adverts = {"boss": Advert(role="volunteer", state="training", step=self.step, block_end=3, name="b")}
        return summarise(SIGNED, adverts, 1000.0 + self.step)

    async def curves(self) -> None:
        return None


class Rig:
    """A view of a swarm and a daemon."""

    def __init__(self, home: Path) -> None:
        self.swarm = Swarm()
        self.state = "training"
        self.view = PageView(self.swarm, LoadMeter(home), self._you)

    def _you(self) -> You:
        return You(
            peer="me",
            state=self.state,
            reason="",
            why="",
            since=1.0,
            tokens_per_second=0.0,
            microbatches=0,
            may=(),
            limits=PageLimits(
                settings={},
                month_bytes=0,
                offered=None,
                main_memory=None,
                program=None,
                offload="",
                on_gpu=False,
            ),
            gpus=(),
        )


@pytest_asyncio.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(page_view, "ANSWER_S", 0.05)
    made = Rig(tmp_path)
    yield made
    await made.view.close()
    assert not made.view._tasks._tasks


async def test_the_owner_sees_the_daemon_while_the_swarm_is_silent(rig: Rig) -> None:
    began = time.time()
    first = await rig.view.look(True)
    assert (first["status"], first["you"]["state"]) == (None, "training")
    assert began <= first["silent_since"] <= first["time"] <= time.time()
    rig.state = "paused"
    second = await rig.view.look(True)
    assert second["you"]["state"] == "paused"
    assert second["silent_since"] == first["silent_since"]
    assert rig.swarm.asked == 1, "it is waited for, and not asked once more"

    rig.swarm.answers.set()
    third = await rig.view.look(True)
    assert (third["status"]["progress"]["step"], third["silent_since"]) == (0, None)
    rig.swarm.answers.clear()
    rig.state, rig.swarm.step = "training", 2
    fourth = await rig.view.look(True)
    assert (fourth["status"]["progress"]["step"], fourth["you"]["state"]) == (0, "training")
    assert fourth["silent_since"] >= third["time"]
    assert fourth["machine"]["memory_total"] == third["machine"]["memory_total"]


@pytest.mark.parametrize(
    ("wrong", "heard"),
    [
        (RemoteError("HP-NET-012", "the network does not answer", why="a test", fix="wait"), 0),
        (OSError("no"), 1),
    ],
)
async def test_a_look_that_fails_is_followed_by_another(
    rig: Rig, wrong: Exception, heard: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig.swarm.answers.set()
    assert (await rig.view.look(True))["silent_since"] is None
    rig.swarm.wrong = wrong
    since = {(await rig.view.look(True))["silent_since"] for _ in range(3)}
    assert len(since) == 1
    assert None not in since
    errors = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert len(errors) == 3 * heard
    rig.swarm.wrong, rig.swarm.step = None, 5
    shown = await rig.view.look(True)
    assert (shown["status"]["progress"]["step"], shown["silent_since"]) == (5, None)


async def test_the_daemons_own_change_does_not_wait_for_the_swarm(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_view, "ANSWER_S", 600.0)
    looking = asyncio.create_task(rig.view.look(True))
    while not rig.swarm.asked:
        await asyncio.sleep(0.01)
    rig.state = "paused"
    rig.view.hurry()
    assert (await asyncio.wait_for(looking, 10.0))["you"]["state"] == "paused"
    looking = asyncio.create_task(rig.view.look(True))
    rig.swarm.answers.set()
    assert (await asyncio.wait_for(looking, 10.0))["status"] is not None, "the next one waits again"
