"""Vouchers: signed permission for a number of peers to join a run until a given day (docs/admission.md)."""

from __future__ import annotations

import base64
import secrets
from typing import Annotated, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field

from hetpeer.bootstrap.run.owner_signature import ManifestPart, Positive, SignedKind

VOUCHER: Final = SignedKind("voucher", 512)

Serial = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class Voucher(ManifestPart):
    """The signed content of a voucher."""

    run_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    serial: Serial
    expires: Annotated[int, Field(ge=0, lt=2**40)]
    """End of validity, in seconds since 1970."""
    uses: Positive
    """Number of peers that the voucher admits."""


def new_voucher(run_id: str, uses: int, expires: int) -> Voucher:
    """A voucher with a new serial number. Raises ValueError."""
    return Voucher(run_id=run_id, serial=secrets.token_hex(8), expires=expires, uses=uses)


def sign_voucher(voucher: Voucher, owner_key: Ed25519PrivateKey) -> bytes:
    """Bytes of the signed voucher."""
    return VOUCHER.seal(voucher.model_dump(), owner_key)


def read_voucher(data: bytes, owner: bytes, run_id: str) -> Voucher:
    """The voucher in `data` if `owner` (a public key) signed it for this run; else ValueError says why."""
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
    """The voucher as lower-case letters and digits, for links."""
    return base64.b32encode(data).decode().rstrip("=").lower()


def of_text(text: str) -> bytes:
    """Inverse of `as_text`. Raises ValueError."""
    padded = text.upper() + "=" * (-len(text) % 8)
    data = base64.b32decode(padded)
    if as_text(data) != text or len(data) > VOUCHER.max_bytes:
        raise ValueError("no voucher")
    return data
