"""What the tests of the page share."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser

from tests.browser.chromium import chromium


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as made:
        yield made
