"""Whose word is against whose, once a sum was not what its parts add up to (docs/trust.md, "Proofs of sums"). Pure.

Somebody else, the witness, adds the same parts in the next plan and looks at them under two keys: the one under which senders have said how their parts look, and the one under
which the reducer in question has looked at what it received. So it is known who says something else than was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.disputed_pairs import Pair
from hetpeer.bootstrap.trust.sum_proof import SumClaim
from hetpeer.bootstrap.trust.verdicts import Same

Receipts = Mapping[tuple[str, m.Where], bytes]
"""What a reducer has of whom."""


class SumDispute:
    """Of `claim`; `witness` adds up the block under `plan`."""

    def __init__(self, claim: SumClaim, witness: str, plan: int) -> None:
        self.claim = claim
        self.witness = witness
        self.plan = plan
        self._received: dict[str, Receipts] = {}

    @property
    def marks(self) -> tuple[m.Mark, m.Mark]:
        """How the witness is to look at what it receives."""
        return self.claim.mark(self.claim.key), self.secret

    @property
    def secret(self) -> m.Mark:
        """How the reducer has looked at it. Senders are asked for it as well, once they have sent their parts again."""
        return self.claim.mark(self.claim.secret)

    def asks(self) -> dict[str, tuple[int, tuple[m.Mark, ...]]]:
        """Who is to testify: under which plan, and how."""
        return {self.claim.reducer: (self.claim.plan, (self.secret,)), self.witness: (self.plan, self.marks)}

    @property
    def silent(self) -> set[str]:
        """Who has not testified."""
        return {self.claim.reducer, self.witness} - self._received.keys()

    def receive(self, peer: str, message: m.Testimony) -> None:
        """What `peer` says that it has received."""
        plan, _ = self.asks().get(peer, (None, ()))
        if plan == message.plan:
            self._received.setdefault(peer, receipts(message.received))

    def judge(self, own: Mapping[str, bytes], same: Same) -> set[Pair]:
        """Pairs of whom one says something false. `own`: how senders say that their parts look under the reducer's key.

        The reducer and the witness have parts of two plans: where they differ it may be the sender's doing, so each is compared with what the sender says.
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
    """By sender and place."""
    return {(one.peer, one.mark.where): one.mark.values for one in received}
