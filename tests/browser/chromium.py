"""A headless Chromium for the tests of the dashboard.

Where it is required (CI) a machine without one is a failure, not a skip.
"""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, async_playwright, expect

FLAGS = [
    "--no-sandbox",  # tests run as root in a container
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
expect.set_options(timeout=30_000)  # each returns when it holds; milliseconds


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """The one that is installed; the test is skipped if there is none."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        message = "there is no chromium: apt-get install chromium"
        if os.environ.get("HETPEER_REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    async with async_playwright() as playwright:
        made = await playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield made
        finally:
            await made.close()
