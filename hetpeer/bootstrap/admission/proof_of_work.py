"""Proof of work: the price of a new identity in an open run, against Sybil attacks (docs/admission.md). Pure.

Hashcash (Back, 2002): a number such that the hash of run, peer and number begins with `bits` zero bits.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

MAX_NONCE_BYTES: Final = 8
_DOMAIN = b"hetpeer proof of work\0"


def is_proof(nonce: bytes, run_id: str, peer: str, bits: int) -> bool:
    """Whether `nonce` proves 2**`bits` hashes on average, for this peer and this run only."""
    return len(nonce) <= MAX_NONCE_BYTES and _is_small(_prefix(run_id, peer) + nonce, bits)


def find_proof(run_id: str, peer: str, bits: int) -> bytes:
    """First valid number. Takes about a second for 20 bits, twice as long for each further bit."""
    prefix = _prefix(run_id, peer)
    number = 0
    while not _is_small(prefix + (nonce := number.to_bytes(MAX_NONCE_BYTES, "big")), bits):
        number += 1
    return nonce


def _prefix(run_id: str, peer: str) -> bytes:
    return _DOMAIN + run_id.encode() + b"\0" + peer.encode() + b"\0"


def _is_small(data: bytes, bits: int) -> bool:
    return int.from_bytes(blake3(data).digest(length=MAX_NONCE_BYTES), "big") >> (64 - bits) == 0
