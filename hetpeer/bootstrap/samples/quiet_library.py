"""Silence for libraries that log what they also raise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_log() -> Iterator[None]:
    """Context without log lines: retries of a hub that cannot be reached, advice, errors raised as well."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
