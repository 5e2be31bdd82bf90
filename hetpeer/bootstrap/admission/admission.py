"""Admission: which peers may take part in a run, by the author's policy and the log (docs/admission.md).

Pure: times and networks are arguments. A decision is in the log before anybody acts on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.admission.proof_of_work import is_proof
from hetpeer.bootstrap.run.admission_policies import ADMISSION_POLICIES
from hetpeer.bootstrap.run.admission_policy import Applicant, Record
from hetpeer.bootstrap.run.amendment import Amendment
from hetpeer.bootstrap.run.settings import AdmissionSettings


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
        self._settings = settings
        self._policy = ADMISSION_POLICIES[settings.policy](run_id, owner)
        self._banned: frozenset[str] = frozenset()
        self._pardoned: Mapping[str, int] = {}
        self._amendment = 0
        """Number of the latest amendment."""
        self._convicted: dict[str, tuple[str, int]] = {}
        """Peer banned by a verdict → (reason, number of the latest amendment at that time)."""
        for record in records:
            self.recorded(record)

    def recorded(self, record: Record) -> None:
        """Fold a log record; kinds without effect on admission are ignored."""
        if record["kind"] == "admitted":
            self._policy.recorded(record)
        elif record["kind"] == "banned":
            self._convicted[record["peer"]] = record["why"], self._amendment
        elif record["kind"] == "amendment":
            self._amendment = max(self._amendment, record["sequence"])

    def amended(self, amendment: Amendment) -> None:
        """Put the author's latest amendment in force."""
        self._banned = frozenset(amendment.banned)
        self._policy.amended(amendment)
        self._pardoned = amendment.pardoned
        self._amendment = max(self._amendment, amendment.sequence)

    def bans(self, peer: str) -> bool:
        """Whether `peer` must be removed."""
        return peer in self._banned or self._conviction(peer) is not None or bool(self._policy.excludes(peer))

    def _conviction(self, peer: str) -> str | None:
        """Reason of the verdict on `peer`; None if there is none or the author has pardoned it since."""
        if peer not in self._convicted:
            return None
        why, amendment = self._convicted[peer]
        return why if amendment >= self._pardoned.get(peer, 0) else None

    def judge(
        self, peer: str, hello: m.Hello, now: float, network: str, others: Iterable[str]
    ) -> Admitted | m.Rejected:
        """Decide on `hello` of `peer` at `now`, in seconds since 1970.

        `network`: the peer's; empty: unknown, and not limited. `others`: those of the present volunteers.
        """
        settings = self._settings
        if peer in self._banned:
            return m.Rejected(reason="banned", why="the run's author has banned this peer")
        if (found := self._conviction(peer)) is not None:
            return m.Rejected(reason="banned", why=f"banned as others have found: {found}")
        if why := self._policy.excludes(peer):
            return m.Rejected(reason="uninvited", why=why)
        if not is_proof(hello.work, self._run_id, peer, settings.work_bits):
            why = f"a proof of work of {settings.work_bits} bits is asked for, and there is none"
            return m.Rejected(reason="work", why=why)
        present = tuple(others)
        try:
            record = self._policy.admit(Applicant(peer, hello.voucher, now, network, present))
        except ValueError as error:
            return m.Rejected(reason="uninvited", why=str(error))
        if settings.per_network and network and present.count(network) >= settings.per_network:
            why = f"{settings.per_network} volunteers of its network are here already"
            return m.Rejected(reason="crowded", why=why)
        if record is not None:
            self._policy.recorded(record)
        return Admitted(record)
