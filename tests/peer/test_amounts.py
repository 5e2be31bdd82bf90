"""Amounts as people type them."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.peer.limits.amounts import (
    DAY,
    duration,
    hours,
    rate,
    share,
    share_or_bytes,
    size,
    volume,
    within,
)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (share_or_bytes, "50%", 0.5),
        (share_or_bytes, "4GiB", 4 * 2**30),
        (share_or_bytes, " 512 mib ", 512 * 2**20),
        (share_or_bytes, "1000000", 1e6),
        (share, "85%", 0.85),
        (volume, "300GB/month", 3e11),
        (volume, "1.5TiB", 1.5 * 2**40),
        (volume, "None", math.inf),
        (volume, "0", math.inf),
        (size, "50 GiB", 50 * 2**30),
        (size, "none", math.inf),
        (rate, "20mbit", 2.5e6),
        (rate, "5 Mbit/s", 625e3),
        (rate, "2MB/s", 2e6),
        (rate, "none", math.inf),
        (rate, "256kbit", 32e3),
        (duration, "1h30m", 5400.0),
        (hours, "22:00-07:00", (1320, 420)),
        (hours, "9:30 - 24:00", (570, 1440)),
    ],
)
def test_what_is_understood(read: Callable[[str], object], text: str, value: object) -> None:
    assert read(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (share_or_bytes, ["", "0%", "101%", "-4GiB", "4 apples", "0", "1", "nan", "9" * 400, "20mbit"]),
        (share, ["85", "1GiB", "0%"]),
        (volume, ["", "-1GB", "5%", "300 GB a month", "9" * 400 + "GB"]),
        (size, ["", "-1GB", "5%", "300GB/month"]),
        (rate, ["", "20", "100kbit", "0mbit", "5%", "-5mbit", "20 mbits"]),
        (duration, ["", "m", "0s", "30"]),
        (hours, ["", "22-7", "22:00", "07:00-07:00", "24:00-07:00", "10:60-11:00", "23:00-25:00"]),
    ],
)
def test_what_is_not(read: Callable[[str], object], texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=r"none|neither|no |too slow"):
            read(text)


@given(begin=st.integers(0, DAY - 1), end=st.integers(0, DAY - 1), minute=st.integers(0, DAY - 1))
def test_a_window_and_the_other_way_round_are_the_day(begin: int, end: int, minute: int) -> None:
    if begin != end:
        assert within((begin, end), minute) != within((end, begin), minute)


@pytest.mark.parametrize("read", [share_or_bytes, volume, size])
def test_a_few_bytes_are_a_forgotten_unit(read: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="say the unit, as in 50GiB"):
        read("50")
