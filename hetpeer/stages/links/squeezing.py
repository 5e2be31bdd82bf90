"""zstd on encoded bytes: what is left between a fixed number of bits and the entropy.

At level 1 it comes to within 1 % of the entropy of steps of 4 or 8 bits, and to within 2 % of that of gaps.
"""

from __future__ import annotations

from typing import Any

import zstandard

from hetpeer.dht.base.errors import ProtocolError

LEVEL = 1
MAX_WINDOW = 1 << 20
"""Bytes that zstd may take for itself if there are fewer to make."""


def squeezed(data: Any) -> bytes:
    """`data`, compressed."""
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def inflated(data: Any, limit: int) -> bytes:
    """Decompress to at most `limit` bytes; the claimed size is checked before zstd allocates it.

    Raises ProtocolError for bytes that `squeezed` does not write.
    """
    try:
        if not 0 <= zstandard.frame_content_size(data) <= limit:
            raise ProtocolError(f"compressed to more than {limit} bytes, or of no said length")
        found: bytes = zstandard.ZstdDecompressor(max_window_size=max(limit, MAX_WINDOW)).decompress(
            data, max_output_size=limit, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ProtocolError("bytes that are not compressed by zstd", why=str(error)) from error
    return found
