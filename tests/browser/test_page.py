"""The dashboard's page in a browser, served by the real application, with views of the worst that peers
could say of themselves.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from playwright.async_api import Browser, Dialog, Page, expect

from hetpeer.dht.discovery import Advert, LinkNote
from hetpeer.peer.limits.setting_layers import worded
from hetpeer.peer.limits.settings import Settings
from hetpeer.peer.limits.web_address import Where
from hetpeer.peer.watching.map_picture import drawn_map
from hetpeer.peer.watching.status_summary import peer_row
from hetpeer.peer.watching.swarm_status import SwarmStatus
from hetpeer.peer.web.dashboard_page import ViewFeed, page_routes
from hetpeer.peer.web.http_server import served
from hetpeer.peer.web.request_guard import application

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

PANELS = (
    *("you", "progress", "map", "machine", "gpu", "limits", "warnings"),
    *("credit", "leftovers", "events", "peers", "links", "plan", "plan-summary", "picture-words"),
)
TOKEN = "a-token-of-a-test"
POLL_S = 0.05
HOSTILE = [
    f"{before}{payload}{after}"
    for payload in (
        "<script>window.harmed=1</script>",
        "<img src=x onerror=window.harmed=1>",
        "<svg onload=window.harmed=1>",
        "<iframe srcdoc='<script>parent.harmed=1</script>'>",
        "<a href='javascript:window.harmed=1'>x</a>",
        "<style>body{display:none}</style>",
        "<body onload=window.harmed=1>",
        "<math><mtext></mtext></math>",
        "javascript:window.harmed=1",
        "${window.harmed=1}",
        "{{constructor.constructor('window.harmed=1')()}}",
        "\u202eevil\u202c\u0000\u001b[31m",
        "<!-- --><template><script>window.harmed=1</script></template>",
        "<details open ontoggle=window.harmed=1>",
        "x" * 300,
    )
    for before, after in (("", ""), ("'>", ""), ('">', "<!--"), ("</td></tr></table>", ""))
]

SETTINGS = {f"{key}": worded(value) for key, value in Settings().flat().items()}


def peer(number: int, name: str) -> dict[str, Any]:
    return {
        "peer": f"Qm{number:044}",
        "name": name,
        "role": name,
        "state": name,
        "blocks": [number % 4, number % 4 + 1],
        "holds": True,
        "step": 7,
        "tokens_per_second": 120.5,
        "computes": 0.7,
        "waits_data": 0.2,
        "waits_room": 0.0,
        "device": name,
        "gpu_bytes": 20 * 2**30,
        "ram_bytes": 14 * 2**30,
        "uplink": 2.5e6,
        "downlink": 12.5e6,
        "up_s": 7500.0,
        "departures": 3,
        "reach": "private",
        "reach_peers": 2,
        "relays": [name],
        "links": [
            {
                "to": name,
                "bytes_per_second": 1e6,
                "trip_s": 0.042,
                "ratio": 4.0,
                "saved_bytes": 10**6,
                "why": f"{name}: the line takes 0.4 s of 1.2 s a microbatch",
                "path": f"through {name}",
            }
        ],
    }


def view(names: list[str]) -> dict[str, Any]:
    """Everything that is text is one of `names`."""
    peers = [peer(number, name) for number, name in enumerate(names)]
    name = names[0]
    return {
        "schema": "hetpeer.view/1",
        "time": time.time(),
        "silent_since": None,
        "status": {
            "time": time.time(),
            "state": "training",
            "reason": name,
            "run": {"name": name, "id": "r", "unit": name},
            "peers": peers,
            "blocks": [
                {"block": block, "holders": [p["peer"] for p in peers if p["blocks"][0] == block][:9]}
                for block in range(5)
            ],
            "unchecked": [one["peer"] for one in peers],
            "leftovers": [{"block": 1, "sender": peers[0]["peer"], "step": 6, "microbatches": 3}],
            "progress": {"step": 7, "steps": 100, "loss": 3.25, "eta_s": 400.0},
            "swarm": {
                "volunteers": len(peers),
                "working": len(peers),
                "coordinator": True,
                "tokens_per_second": 999.0,
                "weakest_block": 4,
                "weakest_holders": 0,
            },
            "credit": {
                "total": 5 * len(peers),
                "contributors": len(peers),
                "first": [
                    {"peer": one["peer"], "name": one["name"], "rank": 1, "credit": 5} for one in peers
                ],
                "yours": {"peer": peers[0]["peer"], "name": name, "rank": 1, "credit": 5},
            },
            "plan": {
                "id": name,
                "since": 3,
                "ended": None,
                "planned_s": 4.0,
                "cost": "swarm",
                "measured_s": 4.4,
                "seats": [
                    {
                        "device": one["name"],
                        "peer": one["peer"],
                        "pipeline": 0,
                        "planned": one["blocks"],
                        "blocks": [0, 1],
                        "standing": "as planned" if one["blocks"] == [0, 1] else "elsewhere",
                    }
                    for one in peers
                ],
            },
        },
        "map": {"words": name, "drawn": 7},
        "curves": {
            "training": [[s, 4 - s / 10] for s in range(8)],
            "evaluation": [[0, 4.2]],
            "speed": [[1e9, 5], [1e9 + 9, 6]],
        },
        "events": [{"time": time.time(), "text": one, "grave": False} for one in names],
        "you": {
            "peer": peers[0]["peer"],
            "state": "training",
            "reason": "",
            "why": "",
            "since": time.time() - 100,
            "tokens_per_second": 3.0,
            "microbatches": 5,
            "may": ["pause", "finish"],
            "limits": {
                "settings": {key: {"value": value, "source": name} for key, value in SETTINGS.items()},
                "month_bytes": 3 * 10**9,
                "offered": 20 * 2**30,
                "main_memory": 14 * 2**30,
                "program": 2 * 2**30,
                "offload": "optimizer in main memory",
                "on_gpu": True,
            },
            "gpus": [
                {
                    "number": 0,
                    "load": {"name": name, "busy": 0.9, "memory_used": 2**33, "memory_total": 24 * 2**30},
                    "celsius": 71.0,
                    "watts": 212.4,
                }
            ],
        },
        "machine": {
            "cpu": 0.5,
            "own_cores": 0.7,
            "memory_used": 2**30,
            "memory_total": 2**32,
            "own_memory": 2**29,
            "disk_free": 2**33,
        },
        "warnings": [{"code": one, "what": one, "why": one, "fix": one} for one in names],
    }


def swarm_status(names: list[str]) -> SwarmStatus:
    """A swarm of these names; each peer has a line to the next one."""
    adverts = {
        f"Qm{number:044}": Advert.model_construct(
            **Advert(role="volunteer").model_dump()
            | {"name": name, "links": (LinkNote(to=f"{number + 1:08}", rate=1e6, trip_s=0.02),)}
        )
        for number, name in enumerate(names)
    }
    rows = tuple(peer_row(peer_id, advert, set(), 0) for peer_id, advert in adverts.items())
    return cast("SwarmStatus", SimpleNamespace(peers=rows))


@dataclass
class Daemon:
    """What stands behind the page."""

    shown: dict[str, Any]
    picture: str = drawn_map(swarm_status(["ada", "bob"])).svg
    asked: list[str] = field(default_factory=list)

    async def look(self, _watched: bool) -> dict[str, Any]:
        return self.shown

    def finish(self) -> None:
        self.asked.append("finish")

    def pause(self) -> None:
        self.asked.append("pause")
        self.shown = self.shown | {
            "you": self.shown["you"] | {"state": "paused", "reason": "user", "may": ["resume"]}
        }


@asynccontextmanager
async def page_of(
    browser: Browser, daemon: Daemon, first: str = "#progress", says: str = "7 of 100", **options: Any
) -> AsyncIterator[Page]:
    """The page, when `first` shows its first view; whatever goes wrong in it fails the test."""
    feed = ViewFeed(daemon.look)
    running = asyncio.create_task(feed.run())
    app = application(
        page_routes(feed, {"pause": daemon.pause, "finish": daemon.finish}, lambda: daemon.picture),
        TOKEN,
        private=False,
    )
    wrong: list[str] = []
    try:
        async with served(app, Where("127.0.0.1", 0)) as url:
            context = await browser.new_context(**options)
            page = await context.new_page()
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
            page.on(
                "request",
                lambda asked: None if asked.url.startswith((url, "data:")) else wrong.append(asked.url),
            )
            await page.goto(f"{url}/#token={TOKEN}")
            await expect(page.locator(first)).to_contain_text(says)
            try:
                yield page
            finally:
                await feed.close()
                await context.close()
    finally:
        running.cancel()
    assert wrong == []


async def test_sixty_hostile_names_are_text(browser: Browser) -> None:
    assert len(HOSTILE) >= 60
    async with page_of(browser, Daemon(view(["harmless"]))) as page:
        usual = await page.evaluate(
            "[...new Set([...document.querySelectorAll('*')].map(e => e.tagName))].sort()"
        )
    async with page_of(browser, Daemon(view(HOSTILE))) as page:
        await expect(page.locator("#peers tbody tr")).to_have_count(len(HOSTILE))
        tags = await page.evaluate(
            "[...new Set([...document.querySelectorAll('*')].map(e => e.tagName))].sort()"
        )
        assert tags == usual
        assert await page.evaluate("window.harmed") is None
        attributes = "[...document.querySelectorAll('*')].flatMap(e => [...e.attributes])"
        handlers = f"{attributes}.filter(a => a.name.startsWith('on')).length"
        assert await page.evaluate(handlers) == 0
        cells = await page.locator("#peers tbody tr:first-child td").all_inner_texts()
        assert cells[1] == HOSTILE[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_readable_on_a_phone(browser: Browser, scheme: str) -> None:
    options = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme}
    async with page_of(browser, Daemon(view(HOSTILE)), **options) as page:
        await expect(page.locator("#loss canvas")).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        paper, ink = await page.evaluate(
            "['backgroundColor', 'color'].map(what => getComputedStyle(document.body)[what])"
        )
        assert (_light(paper) > _light(ink)) == (scheme == "light")


async def test_a_button_asks_the_daemon_and_the_page_shows_what_follows(browser: Browser) -> None:
    daemon = Daemon(view(["ada"]))
    async with page_of(browser, daemon) as page:
        await expect(page.locator("#resume")).to_be_disabled()
        await page.click("#pause")
        await expect(page.locator("#state")).to_have_text("paused: user", timeout=20_000)
        await expect(page.locator("#pause")).to_be_disabled()
    assert daemon.asked == ["pause"]


async def test_who_finishes_is_asked_whether_that_is_meant(browser: Browser) -> None:
    daemon, answers = Daemon(view(["ada"])), [False, True]
    async with page_of(browser, daemon) as page:

        async def answer(dialog: Dialog) -> None:
            await (dialog.accept() if answers.pop(0) else dialog.dismiss())

        page.on("dialog", answer)
        await page.click("#finish")
        assert daemon.asked == []
        async with page.expect_response("**/api/v1/finish"):
            await page.click("#finish")
    assert (daemon.asked, answers) == (["finish"], [])


async def test_a_swarm_that_is_silent_hides_no_button(browser: Browser) -> None:
    daemon = Daemon(view(["ada"]))
    async with page_of(browser, daemon) as page:
        await expect(page.locator("#notice")).to_be_hidden()
        silent = {"silent_since": time.time() - 60.0}
        daemon.shown |= silent | {"you": daemon.shown["you"] | {"state": "paused"}}
        await expect(page.locator("#state")).to_have_text("paused", timeout=20_000)
        await expect(page.locator("#notice")).to_contain_text("the swarm has not answered since ")
        await expect(page.locator("#peers")).to_contain_text("ada")
        daemon.shown |= {"silent_since": None}
        await expect(page.locator("#notice")).to_be_hidden(timeout=20_000)


async def test_before_anything_is_known_of_the_swarm_the_daemon_is_there(browser: Browser) -> None:
    daemon = Daemon(view(["ada"]) | {"status": None, "silent_since": time.time() - 60.0})
    async with page_of(browser, daemon, first="#you", says="microbatches done") as page:
        await expect(page.locator("#state")).to_have_text("training")
        await expect(page.locator("#notice")).to_contain_text("the swarm has not answered since ")
        await expect(page.locator("#machine")).to_contain_text("disk free")
        await page.click("#pause")
        await expect(page.locator("#state")).to_have_text("paused: user", timeout=20_000)


async def test_every_panel_says_something(browser: Browser) -> None:
    async with page_of(browser, Daemon(view(["ada", "bob"]))) as page:
        for panel in PANELS:
            assert await page.locator(f"#{panel}").inner_text(), panel
        await expect(page.locator("#progress")).to_contain_text("not spot-checkedada, bob")
        await expect(page.locator("#map .nobody")).to_have_count(3)
        await expect(page.locator("#speed canvas")).to_be_visible()
        assert await page.title() == "training · ada · hetpeer"


async def test_each_peers_machine_line_and_steadiness_and_the_plan_beside_reality(browser: Browser) -> None:
    daemon = Daemon(view(["ada", "bob"]))
    daemon.shown["status"]["peers"][0]["role"] = "volunteer"
    daemon.shown["status"]["peers"][1] |= {"gpu_bytes": 0, "uplink": 0.0, "departures": None}
    spared = {"role": "volunteer", "state": "backup", "holds": False, "departures": None}
    daemon.shown["status"]["peers"][1] |= spared
    async with page_of(browser, daemon) as page:
        first, second = await page.locator("#peers tbody tr").all_inner_texts()
        for text in (
            "20 GiB GPU, 14 GiB RAM",
            "20.0 Mbit/s up, 100.0 Mbit/s down",
            "here 2h 5m, left 3 times",
        ):
            assert text in first
        assert "0, holder" in first
        assert "1, backup" in second
        assert "14 GiB RAM" in second
        assert "GPU" not in second
        assert "Mbit/s up" not in second
        assert "left" not in second
        await expect(page.locator("#links")).to_contain_text("42 ms")
        summary = page.locator("#plan-summary")
        await expect(summary).to_contain_text("1 of 2 are at their places; a step is planned to take 4.00 s")
        await expect(summary).to_contain_text("measured: 4.40 s")
        assert await page.locator("#plan tbody tr").all_inner_texts() == [
            f"ada …{'0' * 6}\tpipeline 0, block 0\tas planned",
            f"bob …{'0' * 5}1\tpipeline 0, block 1\thas block 0",
        ]
        daemon.shown["status"]["plan"] = None
        await expect(page.locator("#plan-panel")).to_be_hidden(timeout=20_000)


async def drawn(page: Page) -> None:
    """Return once the browser has drawn the picture that it was last told of."""
    seen = (
        "(({ complete, naturalWidth }) => complete && naturalWidth > 0)(document.getElementById('picture'))"
    )
    async with asyncio.timeout(20):
        while not await page.evaluate(seen):
            await asyncio.sleep(POLL_S)


async def test_the_map_is_a_picture_with_words_and_is_asked_for_when_it_has_changed(browser: Browser) -> None:
    daemon = Daemon(view(["ada"]))
    daemon.shown["map"] = {"words": "2 volunteers; nearest: ada and bob, 10 ms one way", "drawn": 7}
    async with page_of(browser, daemon) as page:
        asked: list[str] = []
        page.on("request", lambda one: asked.append(one.url) if "map.svg" in one.url else None)
        picture = page.locator("#picture")
        await expect(picture).to_be_visible()
        await expect(picture).to_have_attribute("alt", re.compile("nearest: ada and bob, 10 ms"))
        await expect(page.locator("#picture-words")).to_contain_text("nearest: ada and bob")
        await drawn(page)
        daemon.picture = drawn_map(swarm_status(HOSTILE)).svg
        daemon.shown["map"] = {"words": HOSTILE[0], "drawn": 8}
        await expect(picture).to_have_attribute("src", re.compile("drawn=8"), timeout=20_000)
        await drawn(page)
        await expect(page.locator("#picture-words")).to_have_text(HOSTILE[0])
        assert await page.evaluate("window.harmed") is None
        assert len(asked) <= 2
        daemon.shown["map"] = None
        await expect(page.locator("#picture-panel")).to_be_hidden(timeout=20_000)


@pytest.mark.parametrize("count", [1, 2, 200])
async def test_a_map_of_any_size_is_drawn(browser: Browser, count: int) -> None:
    daemon = Daemon(view(["ada"]), drawn_map(swarm_status([f"machine {n}" for n in range(count)])).svg)
    async with page_of(browser, daemon, viewport={"width": 360, "height": 740}) as page:
        await drawn(page)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360


async def test_the_gpu_the_limits_and_what_is_wrong(browser: Browser) -> None:
    daemon = Daemon(view(["ada"]))
    settings = daemon.shown["you"]["limits"]["settings"]
    settings["limits.up"] = {"value": "20mbit", "source": "config.toml"}
    settings["limits.down"] = {"value": "none", "source": "default"}
    settings["limits.transfer_cap"] = {"value": "300GB", "source": "default"}
    settings["when.mode"] = {"value": "schedule", "source": "default"}
    settings["compute.offload"] = {"value": "auto", "source": "default"}
    settings["when.hours"] = {"value": "22:00-07:00", "source": "the command line"}
    daemon.shown["warnings"] = [
        {"code": "HP-NET-015", "what": "no connection gets in", "why": "a router", "fix": "let TCP through"}
    ]
    async with page_of(browser, daemon) as page:
        said = await page.locator("#gpu").inner_text()
        assert "8.0 GiB of 24 GiB" in said
        assert "20 GiB" in said
        assert "71 °C" in said
        assert "212 W" in said
        limits = await page.locator("#limits").inner_text()
        for text in ("20mbit (config.toml)", "none", "2.8 GiB of 300GB", "22:00-07:00 (the command line)"):
            assert text in limits
        assert "auto; optimizer in main memory" in limits
        assert "offers 14 GiB" in limits
        assert "held back by" not in limits
        warning = await page.locator("#warnings").inner_text()
        assert warning == "HP-NET-015 no connection gets in: a router. What to do: let TCP through"
        daemon.shown |= {
            "warnings": [],
            "you": daemon.shown["you"] | {"gpus": [], "state": "paused", "reason": "battery,schedule"},
        }
        await expect(page.locator("#limits")).to_contain_text("battery, schedule", timeout=20_000)
        await expect(page.locator("#gpu-panel")).to_be_hidden()
        await expect(page.locator("#warnings-panel")).to_be_hidden()


async def test_who_takes_no_part_has_no_limits(browser: Browser) -> None:
    async with page_of(browser, Daemon(view(["ada"]) | {"you": None})) as page:
        for panel in ("you", "gpu", "limits"):
            await expect(page.locator(f"#{panel}-panel")).to_be_hidden()
        await expect(page.locator("#warnings-panel")).to_be_visible()


def _light(colour: str) -> int:
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))
