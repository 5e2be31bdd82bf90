"""Proofs of the sums in one reduce, plan after plan, until they are proven. Docs: trust.md. Pure.

A step is not committed before its sums are proven: the fingerprints of the parts, stated by their senders,
must add up to the fingerprint of the sum. If they do not, there may be a dispute. In the next plan another
peer, the witness, reduces the same parts and fingerprints them under two keys. The first is the key of the
senders' statements: a sender and the witness may contradict each other. The second is the key under which the
disputed reducer fingerprinted what it received: a sender may contradict the reducer or the witness. The
result is pairs of contradicting peers, which reduce_complaints.py handles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.disputed_pairs import Pair
from hetpeer.bootstrap.conduct.reputation import CheckRules
from hetpeer.bootstrap.state.effects import Effect, Send
from hetpeer.bootstrap.trust.sum_proof import SumClaim, SumProof
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


MOST_DISPUTES = 32
"""Largest number of disputes at a time, so that requests fit into messages."""


@dataclass(slots=True)
class StepSumProofs:
    """Sum proofs of one step, in one term and view."""

    rules: CheckRules | None
    """None: nothing is proven."""
    line: m.TermView
    step: int
    sizes: Mapping[int, int]
    """Block → elements of its vector."""
    _proof: SumProof | None = None
    """Proof of the latest plan, if it needs one."""
    _begun: bool = False
    _claims: list[SumClaim] = field(default_factory=list)
    """Contradicted sums without a dispute yet."""
    _unproven: set[int] = field(default_factory=set)
    """Further blocks that must be reduced again."""
    _fled: set[str] = field(default_factory=set)
    _disputes: list[SumDispute] = field(default_factory=list)
    """Disputes that the latest plan must resolve."""
    _pairs: dict[int, set[Pair]] = field(default_factory=dict)

    # ── plans ───────────────────────────────────────────────────────────────────────────────────────────────

    def choose(self, block: int, fit: Sequence[str], holders: Sequence[str]) -> tuple[str, ...]:
        """Reducers of `block` in the next plan: all that are `fit`, or one witness if it is in dispute."""
        suspects = {claim.reducer for claim in self._claims if claim.block == block}
        if not suspects and block not in self._unproven:
            return tuple(fit)
        assert self.rules is not None
        others = ([peer for peer in some if peer not in suspects] for some in (fit, holders))
        able = next(filter(None, others), holders)
        return (able[int(self.rules.draw() * len(able))],)

    def plan(self, number: int, covers: Iterable[m.Cover]) -> None:
        """Start a new plan."""
        self.void()
        if self.rules is None:
            return
        sound = (cover for cover in covers if len(cover.receivers) > 1 and self.sizes[cover.block] > 0)
        provable = {cover.block: cover for cover in sound}
        for claim in self._claims:
            if claim.block in provable:
                self._open_dispute(claim, provable[claim.block], number)
        besides = [dispute.secret for dispute in self._disputes]
        self._proof = SumProof(number, provable.values(), self.sizes, self.rules, besides)

    def _open_dispute(self, claim: SumClaim, cover: m.Cover, plan: int) -> None:
        self._fled |= {claim.reducer, *claim.said} - {*cover.receivers}
        if cover.slots != claim.slots or claim.reducer not in cover.receivers:
            return  # there is nothing to compare any more
        ((witness, _),) = cover.reducers
        receipts = 2 * sum(len(one.slots) for one in (claim, *(dispute.claim for dispute in self._disputes)))
        if witness != claim.reducer and receipts <= m.MOST_RECEIPTS and len(self._disputes) < MOST_DISPUTES:
            self._disputes.append(SumDispute(claim, witness, plan))

    def void(self) -> None:
        """Note that the latest plan is void."""
        self._proof, self._disputes, self._begun = None, [], False

    def marks(self, peer: str) -> tuple[m.Mark, ...]:
        """Fingerprints that `peer` must take of what it receives under the latest plan."""
        return tuple(mark for dispute in self._disputes if dispute.witness == peer for mark in dispute.marks)

    # ── proven ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def over(self) -> bool:
        """Whether the sums that were voted on are proven right or false."""
        return self._proof is None or (self._begun and self._proof.over and not self._silent)

    def said(self, peer: str) -> list[m.Mark]:
        """Stated fingerprints of what `peer` sent under the latest plan, of whole blocks."""
        return [] if self._proof is None else self._proof.said(peer)

    @property
    def found_false(self) -> bool:
        """Whether sums must be reduced again."""
        return bool(self._claims or self._unproven)

    def huge(self) -> set[str]:
        """Senders of parts in which all others vanish."""
        return set() if self._proof is None else self._proof.huge

    def contradict(self) -> set[str]:
        """Peers whose statements on shares contradict those on the whole."""
        return set() if self._proof is None else self._proof.contradict

    def fled(self) -> set[str]:
        """Peers that left during a dispute about them, since the last call."""
        fled, self._fled = self._fled, set()
        return fled

    def begin(self) -> list[Effect]:
        """Start the proof once all have voted on the latest plan."""
        if self._proof is None or self._begun:
            return []
        self._begun, self._claims, self._unproven = True, [], set()
        asked: dict[tuple[str, int], list[m.Mark]] = {}
        for dispute in self._disputes:
            for peer, (plan, marks) in dispute.asks().items():
                asked.setdefault((peer, plan), []).extend(marks)
        testify = [
            Send(peer, m.Testify(**self._named(plan), marks=tuple(marks)))
            for (peer, plan), marks in asked.items()
        ]
        effects = [*self._ask(self._proof.begin()), *testify]
        self._conclude_if_over()
        return effects

    def receive(self, peer: str, message: m.Proved | m.Testimony) -> list[Effect]:
        """Take fingerprints: `Proved` for this plan's proof, `Testimony` for disputes about earlier plans.

        Returns further requests; the last answer concludes proof and disputes. An unrequested answer changes
        nothing. Raises `ProtocolError` if a `Proved` has other fingerprints than requested.
        """
        if self._proof is None or not self._begun or self.over:
            return []
        effects: list[Effect] = []
        if isinstance(message, m.Testimony):
            for dispute in self._disputes:
                dispute.receive(peer, message)
        else:
            effects = self._ask(self._proof.receive(peer, message))
        self._conclude_if_over()
        return effects

    def _ask(self, asked: Mapping[str, tuple[m.Mark, ...]]) -> list[Effect]:
        """Messages that ask each peer for its fingerprints in the proof."""
        assert self._proof is not None
        named = self._named(self._proof.plan)
        return [Send(peer, m.Prove(**named, marks=marks)) for peer, marks in sorted(asked.items())]

    def _named(self, plan: int) -> dict[str, Any]:
        return {"line": self.line, "step": self.step, "plan": plan}

    def _conclude_if_over(self) -> None:
        """Conclude the proof and the disputes once all answers are here."""
        if self._proof is None or not self.over:
            return
        assert self.rules is not None
        for dispute in self._disputes:
            self._add_pairs(
                {dispute.claim.block: dispute.judge(self._proof.own(dispute.secret), self.rules.equal)}
            )
        self._add_pairs(self._proof.pairs)
        self._claims, self._unproven = self._proof.claims, self._proof.unproven
        self._disputes = []

    def _add_pairs(self, pairs: Mapping[int, set[Pair]]) -> None:
        for block, theirs in pairs.items():
            self._pairs.setdefault(block, set()).update(theirs)

    def disputes(self) -> dict[int, set[Pair]]:
        """Block → contradicting pairs, since the last call."""
        pairs, self._pairs = self._pairs, {}
        return pairs

    # ── waited for ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _silent(self) -> set[str]:
        return set().union(*(dispute.silent for dispute in self._disputes))

    @property
    def silent(self) -> set[str]:
        """Peers with an open answer."""
        if self._proof is None or not self._begun:
            return set()
        return self._proof.silent | self._silent
