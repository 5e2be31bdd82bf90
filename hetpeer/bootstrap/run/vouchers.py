"""Vouchers: the owner's word that so many peers may come into a run, until a certain day. docs/admission.md."""

from __future__ import annotations

import base64
import secrets
from typing import Annotated, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field

from hetpeer.bootstrap.run.owner_signature import SignedKind
from hetpeer.bootstrap.run.settings import ManifestPart, Positive

VOUCHER: Final = SignedKind("voucher", 512)

Serial = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class Voucher(ManifestPart):
    """What the owner signs."""

    run_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    serial: Serial
    expires: Annotated[int, Field(ge=0, lt=2**40)]
    """Seconds since 1970."""
    uses: Positive
    """Peers that it admits."""


def new_voucher(run_id: str, uses: int, expires: int) -> Voucher:
    """With a serial number of its own. Raises ValueError."""
    return Voucher(run_id=run_id, serial=secrets.token_hex(8), expires=expires, uses=uses)


def sign_voucher(voucher: Voucher, owner_key: Ed25519PrivateKey) -> bytes:
    """The bytes that coordinators can check."""
    return VOUCHER.seal(voucher.model_dump(), owner_key)


def read_voucher(data: bytes, owner: bytes, run_id: str) -> Voucher:
    """Raises ValueError, which says why, unless the run's owner (a public key) has signed it, for this run."""
    try:
        sealed = VOUCHER.open(data)
        sealed.check(owner)
        voucher = Voucher.model_validate(sealed.fields())
    except InvalidSignature as error:
        raise ValueError("the run's owner has not signed it") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError("it is damaged") from error
    if voucher.run_id != run_id:
        raise ValueError("it is for another run")
    return voucher


def as_text(data: bytes) -> str:
    """Lower-case letters and digits, for links."""
    return base64.b32encode(data).decode().rstrip("=").lower()


def of_text(text: str) -> bytes:
    """What `as_text` was given. Raises ValueError for anything else."""
    padded = text.upper() + "=" * (-len(text) % 8)
    data = base64.b32decode(padded)
    if as_text(data) != text or len(data) > VOUCHER.max_bytes:
        raise ValueError("no voucher")
    return data
