"""Amounts as people type and read them: shares, sizes, rates, durations, hours, numbers, blocks. Pure.

The readers of typed texts raise ValueError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

SLOWEST = 32_000.0
"""Least bytes/s: with less, peers that share it would each cut us off as too slow (dht/streams/abuse)."""
FEW = 1e6
"""Least number of bytes that may be given without a unit; a smaller number was meant as GiB."""
NONE = frozenset({"none", "0"})
DAY = 24 * 60
"""Minutes."""
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z/%]*)")
_BINARY = {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
_DECIMAL = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SIZES = _BINARY | _DECIMAL
_RATES = {name: bits / 8.0 for name, bits in _BITS.items()} | {
    name: size for name, size in _SIZES.items() if name
}
_DURATIONS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in _DURATIONS))
_HOURS = re.compile(r"(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})")


def share_or_bytes(text: str) -> float:
    """`50%` as a share (0.5), `4GiB`, `512MiB` or a number as bytes."""
    number, unit = _split(text)
    if unit == "%" and 0 < number <= 100:
        return number / 100
    if unit in _SIZES and number * _SIZES[unit] > 1:
        return _with_unit(text, number, unit)
    raise ValueError(f"{text!r} is neither a share such as 50% nor a size such as 4GiB")


def share(text: str) -> float:
    """`85%` as 0.85."""
    number, unit = _split(text)
    if unit == "%" and 0 < number <= 100:
        return number / 100
    raise ValueError(f"{text!r} is no share such as 85%")


def volume(text: str) -> float:
    """Bytes of `300GB` or `300GB/month`; infinite: `none`."""
    return size(text.lower().removesuffix("/month"))


def size(text: str) -> float:
    """Bytes of `50GiB`; infinite: `none`."""
    if text.strip().lower() in NONE:
        return math.inf
    number, unit = _split(text)
    if unit in _SIZES and number:
        return _with_unit(text, number, unit)
    raise ValueError(f"{text!r} is no amount such as 300GB, and not none")


def _with_unit(text: str, number: float, unit: str) -> float:
    """Bytes. Who says 50 means no bytes."""
    if not unit and number < FEW:
        raise ValueError(f"{text!r} would be bytes: say the unit, as in {text.strip()}GiB")
    return number * _SIZES[unit]


def rate(text: str) -> float:
    """Bytes/s of `20mbit`, `20mbit/s`, `2MB/s`; infinite: `none`."""
    if text.strip().lower() in NONE:
        return math.inf
    number, unit = _split(text)
    unit = unit.removesuffix("/s")
    if unit not in _RATES:
        raise ValueError(f"{text!r} is no rate such as 20mbit or 2MB/s, and not none")
    if (found := number * _RATES[unit]) < SLOWEST:
        raise ValueError(f"{text!r} is too slow to be of use: {SLOWEST * 8 / 1000:.0f}kbit is the least")
    return found


def duration(text: str) -> float:
    """Seconds of `1h30m`, `45m`, `2d`, `90s`."""
    found = _DURATION.fullmatch(text.strip().lower())
    parts = found.groups() if found else [None] * len(_DURATIONS)
    seconds = sum(float(part) * unit for part, unit in zip(parts, _DURATIONS.values(), strict=True) if part)
    if not seconds > 0:
        raise ValueError(f"{text!r} is no time such as 1h30m, 45m or 2d")
    return seconds


def hours(text: str) -> tuple[int, int]:
    """(first minute of the day, minute after the last) of `22:00-07:00`, which goes over midnight."""
    found = _HOURS.fullmatch(text.strip())
    numbers = [int(part) for part in found.groups()] if found else []
    if numbers and numbers[1] < 60 and numbers[3] < 60:
        begin, end = numbers[0] * 60 + numbers[1], numbers[2] * 60 + numbers[3]
        if begin < DAY and end <= DAY and begin != end:
            return begin, end
    raise ValueError(f"{text!r} is no time of the day such as 22:00-07:00")


def within(window: tuple[int, int], minute: int) -> bool:
    """Whether a minute of the day is in it."""
    begin, end = window
    return begin <= minute < end if begin < end else minute >= begin or minute < end


def _split(text: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text.strip().lower())
    number = float(found[1]) if found else math.inf
    return (number, found[2]) if found and math.isfinite(number) else (0.0, "?")


def bytes_text(nbytes: float) -> str:
    """`512 B`, `1.5 KiB`, `3.2 GiB`."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def mbit_text(rate: float) -> str:
    """`94.2 Mbit/s` of bytes/s."""
    return f"{rate * 8 / 1e6:,.1f} Mbit/s"


def flops_text(flops: float) -> str:
    """`950 FLOP`, `1.5 GFLOP`."""
    return _scaled(flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def count_text(count: float) -> str:
    """`950`, `1.32 B`: how many parameters."""
    return _scaled(count, 1000, ("", "k", "M", "B", "T")).rstrip()


def block_range(begin: int, end: int) -> str:
    """`7` of [7, 8), `4-7` of [4, 8)."""
    return str(begin) if end - begin == 1 else f"{begin}-{end - 1}"


def blocks_text(begin: int, end: int) -> str:
    """`block 7` of [7, 8), `blocks 4-7` of [4, 8)."""
    return f"block{'' if end - begin == 1 else 's'} {block_range(begin, end)}"


def block_list(blocks: Sequence[int]) -> str:
    """`block 0`, `blocks 3-5, 7`: rising numbers, neighbours joined."""
    ranges: list[list[int]] = []
    for block in blocks:
        if ranges and block == ranges[-1][1]:
            ranges[-1][1] = block + 1
        else:
            ranges.append([block, block + 1])
    return f"block{'' if len(blocks) == 1 else 's'} {', '.join(block_range(*one) for one in ranges)}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 holder`, `2 holders`, `3 microbatches`; `plural` where an s is not enough."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    """Three digits and a unit; small whole numbers as they are."""
    scale = 0
    while value >= base - 0.5 and scale < len(units) - 1:
        value, scale = value / base, scale + 1
    number = f"{value:.0f}" if scale == 0 or value >= 100 else f"{value:.3g}"
    return f"{number} {units[scale]}"
