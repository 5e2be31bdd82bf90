"""Amendments of a manifest: the run's reliable peers from now on, and who may take part.

The manifest's hash is the run's id and never changes; machines come and go. An amendment names the run, a
sequence number, the reliable peers and the lists of docs/admission.md. The run's owner signs it. The manifest
itself counts as number 0 with empty lists; the highest number is in force.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field, ValidationError

from hetpeer.bootstrap.run.owner_signature import AMENDMENT, Coordinators, ManifestPart, PeerId, Positive
from hetpeer.bootstrap.run.vouchers import Serial
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.untrusted import first_wrong

MAX_LISTED = 256
Peers = Annotated[tuple[PeerId, ...], Field(max_length=MAX_LISTED)]


class Amendment(ManifestPart):
    """The signed content of an amendment."""

    run_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    sequence: Positive
    coordinators: Coordinators
    banned: Peers = ()
    """Peers that may not take part."""
    listed: Peers = ()
    """Peers that may take part if the run's policy is `listed`."""
    revoked: Annotated[tuple[Serial, ...], Field(max_length=MAX_LISTED)] = ()
    """Serial numbers of revoked vouchers."""
    pardoned: Annotated[dict[PeerId, Positive], Field(default_factory=dict, max_length=MAX_LISTED)]
    """Peer → amendment number; verdicts on the peer from before that amendment no longer count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """The difference between an amendment and the one before it."""

    coordinators: tuple[str, ...] = ()
    """All reliable peers from now on; empty: unchanged."""
    ban: tuple[str, ...] = ()
    unban: tuple[str, ...] = ()
    """Peers to admit again, whether the author or a verdict banned them."""
    enlist: tuple[str, ...] = ()
    unlist: tuple[str, ...] = ()
    revoke: tuple[str, ...] = ()

    def fields(self, before: Amendment | None, reliable: tuple[str, ...]) -> dict[str, Any]:
        """Fields of the next amendment, not validated: `before` and `reliable` are the ones in force."""
        banned, listed, revoked = (before.banned, before.listed, before.revoked) if before else ((), (), ())
        number, pardoned = (before.sequence, before.pardoned) if before else (0, {})
        pardoned = {peer: at for peer, at in pardoned.items() if peer not in self.ban}
        return {
            "coordinators": self.coordinators or reliable,
            "banned": _with(banned, self.ban, self.unban),
            "listed": _with(listed, self.enlist, self.unlist),
            "revoked": _with(revoked, self.revoke, ()),
            "pardoned": pardoned | dict.fromkeys(self.unban, number + 1),
        }


def _with(before: tuple[str, ...], more: tuple[str, ...], fewer: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one for one in dict.fromkeys((*before, *more)) if one not in fewer)


@dataclass(frozen=True, slots=True)
class SignedAmendment:
    """An amendment with a checked signature, and its bytes."""

    amendment: Amendment
    data: bytes


def sign_amendment(amendment: Amendment, owner_key: Ed25519PrivateKey) -> bytes:
    """Bytes of the signed amendment."""
    return AMENDMENT.seal(amendment.model_dump(), owner_key)


def read_amendment(data: bytes, owner: bytes, run_id: str) -> SignedAmendment:
    """The amendment in `data` if `owner` (public key) signed it for the run; else `LocalError` HP-RUN-013."""
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
    """The amendment in `data`. Raises ValueError if the signature, a field or the run is wrong."""
    sealed = AMENDMENT.open(data)
    sealed.check(owner)
    try:
        amendment = Amendment.model_validate(sealed.fields())
    except ValidationError as error:
        raise ValueError(": ".join(first_wrong(error))) from error
    if amendment.run_id != run_id:
        raise ValueError("it is of another run")
    return amendment
