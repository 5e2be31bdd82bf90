"""Admission: which peers may take part in a run, by the author's policy and the log (docs/admission.md).

Pure: times and networks are arguments. A decision is in the log before anybody acts on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.admission.proof_of_work import is_proof
from hetpeer.bootstrap.run.amendment import Amendment
from hetpeer.bootstrap.run.settings import AdmissionSettings
from hetpeer.bootstrap.run.vouchers import read_voucher

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The peer may take part; `record`, if any, must be in the log before the peer is told."""

    record: dict[str, Any] | None = None


class Admission:
    """Admission to the run `run_id` of `owner` (a public key); `records` is the log so far."""

    def __init__(
        self, run_id: str, owner: bytes, settings: AdmissionSettings, records: Iterable[Record] = ()
    ) -> None:
        self._run_id = run_id
        self._owner = owner
        self._settings = settings
        self._banned: frozenset[str] = frozenset()
        self._listed: frozenset[str] = frozenset()
        self._revoked: frozenset[str] = frozenset()
        self._pardoned: Mapping[str, int] = {}
        self._amendment = 0
        """Number of the latest amendment."""
        self._convicted: dict[str, tuple[str, int]] = {}
        """Peer banned by a verdict → (reason, number of the latest amendment at that time)."""
        self._admitted: dict[str, str] = {}
        """Peer → serial number of its voucher."""
        self._used: Counter[str] = Counter()
        for record in records:
            self.recorded(record)

    def recorded(self, record: Record) -> None:
        """Fold a log record; kinds without effect on admission are ignored."""
        if record["kind"] == "admitted":
            self._admit(record)
        elif record["kind"] == "banned":
            self._convicted[record["peer"]] = record["why"], self._amendment
        elif record["kind"] == "amendment":
            self._amendment = max(self._amendment, record["sequence"])

    def amended(self, amendment: Amendment) -> None:
        """Put the author's latest amendment in force."""
        self._banned = frozenset(amendment.banned)
        self._listed = frozenset(amendment.listed)
        self._revoked = frozenset(amendment.revoked)
        self._pardoned = amendment.pardoned
        self._amendment = max(self._amendment, amendment.sequence)

    def bans(self, peer: str) -> bool:
        """Whether `peer` must be removed."""
        return (
            peer in self._banned
            or self._conviction(peer) is not None
            or (self._settings.policy == "listed" and peer not in self._listed)
        )

    def _conviction(self, peer: str) -> str | None:
        """Reason of the verdict on `peer`; None if there is none or the author has pardoned it since."""
        if peer not in self._convicted:
            return None
        why, amendment = self._convicted[peer]
        return why if amendment >= self._pardoned.get(peer, 0) else None

    def judge(
        self, peer: str, hello: m.Hello, now: float, network: str, others: Iterable[str]
    ) -> Admitted | m.Rejected:
        """Decide on `hello` of `peer` at `now` (seconds since 1970).

        `network` is the peer's network, `others` those of the present volunteers. An unknown network is empty
        and not limited.
        """
        settings = self._settings
        if peer in self._banned:
            return m.Rejected(reason="banned", why="the run's author has banned this peer")
        if (found := self._conviction(peer)) is not None:
            return m.Rejected(reason="banned", why=f"banned as others have found: {found}")
        if self.bans(peer):
            return m.Rejected(reason="uninvited", why="the run is for peers that its author has listed")
        if not is_proof(hello.work, self._run_id, peer, settings.work_bits):
            why = f"a proof of work of {settings.work_bits} bits is asked for, and there is none"
            return m.Rejected(reason="work", why=why)
        record: dict[str, Any] | None = None
        if settings.policy == "invited" and peer not in self._admitted.keys() | self._listed:
            try:
                record = self._admission(peer, hello.voucher, now)
            except ValueError as error:
                return m.Rejected(reason="uninvited", why=str(error))
        if settings.per_network and network and sum(one == network for one in others) >= settings.per_network:
            why = f"{settings.per_network} volunteers of its network are here already"
            return m.Rejected(reason="crowded", why=why)
        if record is not None:
            self._admit(record)
        return Admitted(record)

    def _admission(self, peer: str, data: bytes, now: float) -> dict[str, Any]:
        """Record that admits `peer` by a voucher.

        Raises ValueError with the reason if the voucher does not.
        """
        if not data:
            raise ValueError("the run is for peers with an invite that its author made for them")
        try:
            voucher = read_voucher(data, self._owner, self._run_id)
        except ValueError as error:
            raise ValueError(f"the invite's voucher is not valid: {error}") from error
        if voucher.serial in self._revoked:
            raise ValueError("the invite was revoked")
        if now > voucher.expires:
            raise ValueError("the invite has expired")
        if self._used[voucher.serial] >= voucher.uses:
            raise ValueError(f"the invite was for {voucher.uses} peers, and as many have used it")
        return {"kind": "admitted", "peer": peer, "serial": voucher.serial}

    def _admit(self, record: Record) -> None:
        """Count an admission; a repeated record of a peer counts once."""
        if record["peer"] not in self._admitted:
            self._admitted[record["peer"]] = record["serial"]
            self._used[record["serial"]] += 1
