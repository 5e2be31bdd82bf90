"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def bytes_text(nbytes: float) -> str:
    """`512 B`, `1.5 KiB`, `3.2 GiB`."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


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
