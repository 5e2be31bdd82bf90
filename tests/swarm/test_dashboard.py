"""The dashboard of a volunteer at work, in a browser: every panel is filled, its buttons do what they say,
and changes are seen at once.
"""

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from hetpeer.bootstrap.run.run_directory import RunDirectory
from tests.browser.chromium import chromium
from tests.swarm.child import POLL_S, Child, until
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.browser, pytest.mark.timeout(400)]

SOON_MS = 20_000
"""Ten times the goal of two seconds."""
SCREENSHOTS = os.environ.get("HETPEER_SCREENSHOTS", "")
"""Where pictures for the README are put, if they are wanted."""


async def link(child: Child) -> str:
    await child.says("dashboard at ")
    return re.findall(r"dashboard at (\S+)", child.said)[0]


async def picture(page: Page, name: str) -> None:
    if SCREENSHOTS:
        await page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)


async def step_of(page: Page) -> int:
    """That it shows."""
    said = await page.locator("#progress dt:text-is('step') + dd").inner_text()
    return int(said.partition(" of ")[0].replace(",", ""))


def long(swarm: Swarm) -> RunDirectory:
    """Its run, as one that does not end by itself."""
    training = swarm.run.manifest.training.model_copy(update={"steps": 100_000, "checkpoint_every": 10})
    return resign(swarm.run, training=training)


async def _others_are_seen(swarm: Swarm, page: Page) -> None:
    """A commit, and a volunteer that comes and leaves."""
    await swarm.committed(swarm.version + 1)
    committed = swarm.version
    async with asyncio.timeout(SOON_MS / 1000):
        while await step_of(page) < committed:
            await asyncio.sleep(POLL_S)

    guest = swarm.volunteer("guest")
    await guest.says("computes on")
    await expect(page.locator("#peers")).to_contain_text("guest", timeout=SOON_MS)
    await expect(page.locator("#events")).to_contain_text("guest joined (volunteer)", timeout=SOON_MS)
    guest.signal(signal.SIGINT)
    assert await guest.ended() == 0
    await expect(page.locator("#peers")).not_to_contain_text("guest", timeout=SOON_MS)
    await expect(page.locator("#events")).to_contain_text("guest left", timeout=SOON_MS)


async def test_the_page_shows_at_once_what_happens_and_its_buttons_work(swarm: Swarm) -> None:
    """Whether its buttons cause it, the owner on the command line, the coordinator or other volunteers."""
    swarm.run = long(swarm)
    boss = await swarm.bootstrap("--dashboard", "0")
    one, other = swarm.volunteer("ada", "--dashboard", "0"), swarm.volunteer("grace")
    for volunteer in (one, other):
        await volunteer.says("you are contributing")
    await swarm.stored(10, within_s=100.0)
    async with chromium() as browser:
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        await page.goto(await link(one))
        await expect(page.locator("#state")).to_have_text("training", timeout=SOON_MS)
        await expect(page.locator("#limits")).to_contain_text("upload")
        await expect(page.locator("#gpu-panel")).to_be_hidden()
        await expect(page.locator("#progress")).to_contain_text("of 100,000")
        await expect(page.locator("#peers tbody tr")).to_have_count(3, timeout=SOON_MS)
        await expect(page.locator("#peers")).to_contain_text("grace")
        await expect(page.locator("#credit")).to_contain_text("ada", timeout=SOON_MS)
        await expect(page.locator("#you")).to_contain_text("microbatches done")
        await expect(page.locator("#loss canvas")).to_be_visible(timeout=SOON_MS)
        points = re.compile(r"^([5-9]|\d\d+)$")  # of before the page was opened, too: the log has them
        await expect(page.locator("#loss")).to_have_attribute("data-points", points, timeout=SOON_MS)
        await expect(page.locator("#links tbody tr").first).to_be_visible(timeout=SOON_MS)
        await expect(page.locator("#map .nobody")).to_have_count(
            0, timeout=SOON_MS
        )  # a busy machine parts with one now and then
        await picture(page, "dashboard")
        await page.emulate_media(color_scheme="dark")
        await picture(page, "dashboard-dark")

        await _others_are_seen(swarm, page)

        await page.click("#pause")
        await expect(page.locator("#state")).to_have_text("paused: user", timeout=SOON_MS)
        await until(lambda: "worker" not in one.helpers(), "its worker is gone")
        await one.says("paused (user)")  # who is asked to go on before that has not rested at all
        await page.click("#resume")
        await one.says("resumed")
        await expect(page.locator("#state")).to_have_text("training", timeout=60_000)

        watching = await browser.new_page(viewport={"width": 360, "height": 740})
        await watching.goto(await link(boss))
        await expect(watching.locator("#state")).to_contain_text("training", timeout=SOON_MS)
        await expect(watching.locator("#buttons")).to_be_hidden()
        assert await watching.evaluate("document.documentElement.scrollWidth") <= 360
        await picture(watching, "dashboard-phone")

        assert await swarm.start("pause", "pause", home=one.home).ended() == 0
        await expect(page.locator("#state")).to_have_text("paused: user", timeout=SOON_MS)
        await expect(page.locator("#limits")).to_contain_text("held back by")

        assert wrong == []
        page.on("dialog", lambda asks: asks.accept())
        await page.click("#finish")
        assert await one.ended() == 0
    await swarm.left([other])  # it holds half of the run: nothing more is stored
