"""A proof of work: what a new identity costs in an open run, so that nobody comes with a thousand (docs/admission.md). Pure.

Hashcash (Back, 2002): a number such that the hash of run, peer and number begins with so many zero bits.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

MAX_BITS: Final = 32
MAX_NONCE_BYTES: Final = 8
_DOMAIN = b"hetpeer proof of work\0"


def is_proof(nonce: bytes, run_id: str, peer: str, bits: int) -> bool:
    """Whether `nonce` is worth 2**`bits` hashes, on average, to this peer in this run, and to nobody else."""
    return len(nonce) <= MAX_NONCE_BYTES and _is_small(_prefix(run_id, peer) + nonce, bits)


def find_proof(run_id: str, peer: str, bits: int) -> bytes:
    """The first such number. Takes about a second for 20 bits, twice as long for each more."""
    prefix = _prefix(run_id, peer)
    number = 0
    while not _is_small(prefix + (nonce := number.to_bytes(MAX_NONCE_BYTES, "big")), bits):
        number += 1
    return nonce


def _prefix(run_id: str, peer: str) -> bytes:
    return _DOMAIN + run_id.encode() + b"\0" + peer.encode() + b"\0"


def _is_small(data: bytes, bits: int) -> bool:
    return int.from_bytes(blake3(data).digest(length=MAX_NONCE_BYTES), "big") >> (64 - bits) == 0
