"""Dispute about a sum that is not the sum of its parts: who contradicts whom (docs/trust.md, "Proofs of
sums"). Pure.

A witness reduces the same parts in the next plan and fingerprints them under two keys: the key of the
senders' statements, and the key under which the disputed reducer fingerprinted what it received. That shows
who states something else than what was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.disputed_pairs import Pair
from hetpeer.bootstrap.trust.sum_proof import SumClaim
from hetpeer.bootstrap.trust.verdicts import Same

Receipts = Mapping[tuple[str, m.Where], bytes]
"""(sender, place) → fingerprint of the part that a reducer received."""


class SumDispute:
    """Dispute about `claim`; `witness` reduces the block under `plan`."""

    def __init__(self, claim: SumClaim, witness: str, plan: int) -> None:
        self.claim = claim
        self.witness = witness
        self.plan = plan
        self._received: dict[str, Receipts] = {}

    @property
    def marks(self) -> tuple[m.Mark, m.Mark]:
        """Fingerprints that the witness must take of what it receives."""
        return self.claim.mark(self.claim.key), self.secret

    @property
    def secret(self) -> m.Mark:
        """Fingerprint that the reducer took; senders are asked for it after they sent their parts again."""
        return self.claim.mark(self.claim.secret)

    def asks(self) -> dict[str, tuple[int, tuple[m.Mark, ...]]]:
        """Peer that must testify → (plan, fingerprints)."""
        return {self.claim.reducer: (self.claim.plan, (self.secret,)), self.witness: (self.plan, self.marks)}

    @property
    def silent(self) -> set[str]:
        """Peers that have not testified yet."""
        return {self.claim.reducer, self.witness} - self._received.keys()

    def receive(self, peer: str, message: m.Testimony) -> None:
        """Take the testimony of `peer` on what it received."""
        plan, _ = self.asks().get(peer, (None, ()))
        if plan == message.plan:
            self._received.setdefault(peer, receipts(message.received))

    def judge(self, own: Mapping[str, bytes], same: Same) -> set[Pair]:
        """Pairs of which one made a false statement. `own`: sender → its fingerprint under the reducer's key.

        The reducer and the witness received parts under two plans. A difference may be the sender's fault, so
        each is compared with the sender's statement.
        """
        reducer, witness = self.claim.reducer, self.witness
        secret, said = self.secret.where, self.claim.mark(self.claim.key).where
        first, second = self._received[reducer], self._received[witness]
        pairs: set[Pair] = set()
        for peer, word in self.claim.said.items():
            known = [(witness, said, word, second), (witness, secret, own.get(peer, b""), second)]
            known.append((reducer, secret, own.get(peer, b""), first))
            pairs |= {
                frozenset((peer, other))
                for other, place, mine, theirs in known
                if other != peer and not same(mine, theirs.get((peer, place), b""))
            }
        return pairs or {frozenset((reducer, witness))}


def receipts(received: Sequence[m.Receipt]) -> Receipts:
    """`received` by sender and place."""
    return {(one.peer, one.mark.where): one.mark.values for one in received}
