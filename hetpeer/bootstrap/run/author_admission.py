"""Policies by which the author admits each peer: with a voucher, or by a list. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hetpeer.bootstrap.run.admission_policy import AdmissionPolicy, Applicant, Record
from hetpeer.bootstrap.run.vouchers import read_voucher


class Listed(AdmissionPolicy):
    """Peers whose ids an amendment lists."""

    describe = "everybody on the author's list may take part"
    how = "hetpeer amend DIR --list ID"

    def excludes(self, peer: str) -> str:
        return "" if peer in self.listed else "the run is for peers that its author has listed"


class Invited(AdmissionPolicy):
    """Peers that show a voucher signed by the author, were admitted with one before, or are listed."""

    describe = "everybody who has a voucher may take part"
    how = "hetpeer invite DIR --uses N"
    takes_vouchers = True

    def __init__(self, run_id: str, owner: bytes) -> None:
        super().__init__(run_id, owner)
        self._admitted: dict[str, str] = {}
        """Peer → serial number of its voucher."""
        self._used: Counter[str] = Counter()

    def admit(self, applicant: Applicant) -> dict[str, Any] | None:
        if applicant.peer in self._admitted or applicant.peer in self.listed:
            return None
        if not applicant.voucher:
            raise ValueError("the run is for peers with an invite that its author made for them")
        try:
            voucher = read_voucher(applicant.voucher, self.owner, self.run_id)
        except ValueError as error:
            raise ValueError(f"the invite's voucher is not valid: {error}") from error
        if voucher.serial in self.revoked:
            raise ValueError("the invite was revoked")
        if applicant.now > voucher.expires:
            raise ValueError("the invite has expired")
        if self._used[voucher.serial] >= voucher.uses:
            raise ValueError(f"the invite was for {voucher.uses} peers, and as many have used it")
        return {"kind": "admitted", "peer": applicant.peer, "serial": voucher.serial}

    def recorded(self, record: Record) -> None:
        """Count an admission; a repeated record of a peer counts once."""
        if record["peer"] not in self._admitted:
            self._admitted[record["peer"]] = record["serial"]
            self._used[record["serial"]] += 1
