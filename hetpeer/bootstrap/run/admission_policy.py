"""The interface of an admission policy: who may take part in a run, by the author's choice. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hetpeer.bootstrap.run.amendment import Amendment

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Applicant:
    """A peer that says `Hello`."""

    peer: str
    voucher: bytes
    """The voucher of the peer's invite; empty if it has none."""
    now: float
    """Seconds since 1970, by the coordinator's clock."""
    network: str
    """The peer's network (/24, /48); empty if unknown."""
    others: tuple[str, ...]
    """Networks of the present volunteers."""


class AdmissionPolicy:
    """A policy of one run, with what it has counted from the log. As it stands, everybody is admitted.

    Bans, the proof of work and the limit per network are checked for every policy (admission/admission.py).
    Registered in admission_policies.py. See docs/extending.md.
    """

    describe: ClassVar[str]
    """`everybody …`, for people."""
    how: ClassVar[str] = ""
    """The command by which the author admits somebody."""
    takes_vouchers: ClassVar[bool] = False
    """Whether `hetpeer invite` may make vouchers."""

    def __init__(self, run_id: str, owner: bytes) -> None:
        self.run_id = run_id
        self.owner = owner
        """The author's public key."""
        self.listed: frozenset[str] = frozenset()
        """Peers that the latest amendment lists."""
        self.revoked: frozenset[str] = frozenset()
        """Serial numbers of vouchers that the policy revokes."""

    def amended(self, amendment: Amendment) -> None:
        """Put the author's latest amendment in force."""
        self.listed, self.revoked = frozenset(amendment.listed), frozenset(amendment.revoked)

    def excludes(self, peer: str) -> str:
        """The reason for which `peer` may not be here, and must leave if it is; empty if there is none."""
        del peer
        return ""

    def admit(self, applicant: Applicant) -> dict[str, Any] | None:
        """Admit a newcomer: the record that must be in the log before it is told, or None.

        The record has the kind `admitted`, the `peer` and a `serial`, a string. Raises ValueError with the
        reason of a refusal. It depends on the applicant, the amendment and the log alone, and changes nothing
        here: every coordinator must decide alike.
        """
        del applicant
        return None

    def recorded(self, record: Record) -> None:
        """Fold an `admitted` record. One that is read again must not count twice."""
        del record


class Open(AdmissionPolicy):
    """Admission of everybody that the author has not banned."""

    describe = "everybody who has the invite may take part"
