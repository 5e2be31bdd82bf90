"""Amendments of a manifest: who the reliable peers of the run are from now on.

The manifest's hash is the run's id, and stays; machines come and go. An amendment names the run, a sequence number and the
reliable peers, and is signed by the owner. The manifest itself has number 0; the highest number counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import AfterValidator, Field

from hetpeer.bootstrap.settings import Entry, Positive
from hetpeer.bootstrap.signing import AMENDMENT
from hetpeer.dht.errors import ExitCode, LocalError

PeerId = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{10,100}$")]


def _odd_and_different(peers: tuple[str, ...]) -> tuple[str, ...]:
    if len(peers) % 2 == 0 or len(set(peers)) < len(peers):
        raise ValueError(f"1, 3 or 5 different reliable peers, not {len(peers)}")
    return peers


Coordinators = Annotated[
    tuple[PeerId, ...], Field(min_length=1, max_length=5), AfterValidator(_odd_and_different)
]
"""Peer ids of the reliable peers: of two or four none more may be away than of one or three."""


class Amendment(Entry):
    """What the owner signs."""

    run_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    sequence: Positive
    coordinators: Coordinators


@dataclass(frozen=True, slots=True)
class SignedAmendment:
    """One whose signature was checked, and its bytes."""

    amendment: Amendment
    data: bytes


def sign_amendment(amendment: Amendment, owner_key: Ed25519PrivateKey) -> bytes:
    """The bytes that others can check."""
    return AMENDMENT.seal(amendment.model_dump(), owner_key)


def read_amendment(data: bytes, owner: bytes, run_id: str) -> SignedAmendment:
    """Raises `LocalError` HP-RUN-013 unless the run's owner (public key) has signed it, for this run."""
    try:
        return SignedAmendment(_checked(data, owner, run_id), data)
    except (ValueError, TypeError, KeyError, InvalidSignature) as error:
        raise LocalError(
            "HP-RUN-013",
            "an amendment of the manifest is damaged or not signed by the run's owner",
            why=str(error) or "the signature does not fit",
            fix="put back a copy of it: each reliable peer has one in its run directory",
            exit_code=ExitCode.VERSION,
        ) from error


def _checked(data: bytes, owner: bytes, run_id: str) -> Amendment:
    sealed = AMENDMENT.open(data)
    sealed.check(owner)
    amendment = Amendment.model_validate(sealed.fields())
    if amendment.run_id != run_id:
        raise ValueError("it is of another run")
    return amendment
