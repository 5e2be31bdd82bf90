"""What is fuzzed: a decoder of bytes from outside, what it may raise, and what must hold of what it lets
through.

A decoder that wants a signature is given what the fuzzer made of the signed part, signed: else nothing behind
the door is reached.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hetpeer.dht.base.errors import HetpeerError
from hetpeer.dht.identity.peer_identity import Identity

A, B = (
    "QmPZ9gcCEpqKTo6aq61g2nXGUhM4iCL3ewB6LDXZCtioEB",
    "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC",
)
"""Two peers."""
RUN = "3f" * 16
PLACES = [
    f"/ip4/203.0.113.7/tcp/31330/p2p/{B}",
    f"/ip6/2a01:4f8::1/tcp/31330/p2p/{A}",
    f"/dns4/peer.example.org/udp/4001/quic-v1/p2p/{A}",
    f"/ip4/10.0.0.7/tcp/1/p2p/{B}/p2p-circuit/p2p/{A}",
    f"/dns6/bücher.example/tcp/80/http-path/a_b~..--/p2p/{A}",
]
CORPUS = Path(__file__).with_name("corpus")
MAX_TEXT = 4096
"""Characters of an error: what a peer sends is not to fill logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`decode` raises one of `refuses`, or what it returns passes `holds`, which raises AssertionError or
    whatever is wrong.
    """

    decode: Callable[[bytes], Any]
    refuses: tuple[type[Exception], ...]
    seeds: Callable[[], Iterable[bytes]]
    """Bytes that are let through, made by what makes them in earnest."""
    holds: Callable[[Any], None] = lambda _found: None
    max_len: int = 4096
    """Bytes that are tried at most."""


def attempt(target: Target, data: bytes) -> str:
    """Decode `data`: `sound: …` with the kind of thing that it is, or `refused: …` and why.

    Raises whatever the decoder must not.
    """
    try:
        found = target.decode(data)
    except target.refuses as error:
        if isinstance(error, HetpeerError):  # what is shown and logged
            text = error.line()
            assert len(text) <= MAX_TEXT, f"an error of {len(text)} characters: {text[:200]}"
        return f"refused: {error} {_cause(error.__cause__)}"
    target.holds(found)
    return f"sound: {getattr(found, 'kind', type(found).__name__)}"


def ending(outcome: str) -> str:
    """What `attempt` says, without what is different each time."""
    return re.sub(r"\d+|'[^']*'|\"[^\"]*\"", "", outcome)[:300]


def _cause(error: BaseException | None) -> str:
    """What of a schema was not kept, or the kind of error."""
    if isinstance(error, ValidationError):
        return " ".join(f"{first['loc']} {first['type']}" for first in error.errors()[:3])
    return type(error).__name__


def kept(name: str) -> list[bytes]:
    """What fuzzing has left behind for a target: inputs that reach what the seeds do not, and those that
    broke it once.
    """
    folder = CORPUS / name
    return [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []


@cache
def known() -> Identity:
    """An identity whose key everybody knows, so that what it has signed can be kept."""
    return Identity.load_copy(Path(__file__).with_name("known.key"))[0]


def same(encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> Callable[[Any], None]:
    """That what was let through can be written, and read again as the same.

    Compared are bytes: NaN is not itself.
    """

    def holds(found: Any) -> None:
        data = encode(found)
        assert encode(decode(data)) == data

    return holds
