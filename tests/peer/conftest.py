"""What the tests of the daemon and its commands have in common."""

import logging
from collections.abc import Iterator

import pytest

from hetpeer.peer.process import console


@pytest.fixture(autouse=True)
def not_quiet() -> Iterator[None]:
    """A command that was run here with -q leaves nobody else without a word."""
    console.show_from(logging.WARNING)
    yield
    console.show_from(logging.WARNING)
