"""The codec of a link and the reason for it, as people read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetpeer.dht.discovery import LinkNote


def codec_reason(note: LinkNote) -> str:
    """Codec of a link and its reason; empty if the run's links do not adapt.

    codec_reason(note)  # int8: the line takes 0.4 s of 1.2 s a microbatch
    """
    if not note.codec or not note.aim_s:
        return ""
    if not note.rate:
        return f"{note.codec}: the line is not measured yet"
    took = max(note.activation_bytes, note.gradient_bytes) / note.rate
    return f"{note.codec}: the line takes {_short(took)} of {_short(note.aim_s)} a microbatch"


def _short(seconds: float) -> str:
    """`12 s`, `1.2 s`, `40 ms`."""
    if seconds < 0.1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
