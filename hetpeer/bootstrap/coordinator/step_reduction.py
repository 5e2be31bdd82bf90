"""The reduce of one step: plans, votes, proofs and spot checks, until there is a decision.

Pure. step.py decides what is reduced, and when all of it is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.conduct.outliers import Lengths, lengths
from hetpeer.bootstrap.coordinator.reduction import Contribution, Reduce
from hetpeer.bootstrap.coordinator.step_ledger import StepLedger
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect, Send
from hetpeer.bootstrap.state.timeouts import AdaptiveTimeouts
from hetpeer.bootstrap.trust.reduce_complaints import ReduceComplaints
from hetpeer.bootstrap.trust.step_spot_checks import StepSpotChecks
from hetpeer.bootstrap.trust.sum_proofs import StepSumProofs
from hetpeer.stages.pipeline.routes import Route


class StepReduction:
    """The reduce of step `number`; `roster`: the step's own, as it changes; `route_taken`: id → its route."""

    def __init__(
        self,
        context: CoordinatorContext,
        number: int,
        roster: Mapping[str, Range],
        ledger: StepLedger,
        route_taken: Callable[[int], Route],
        timeouts: AdaptiveTimeouts,
        now: float,
    ) -> None:
        config = context.config
        self.reduce = Reduce(
            config,
            {peer: context.members.volunteers[peer].uplink for peer in roster},
            ReduceComplaints(context.disputed_pairs, config.ties),
            timeouts,
            guarded=config.checks is not None,
        )
        self.covers: Mapping[int, Sequence[Contribution]] = {}
        """Block → holders and ids that the latest plan adds."""
        elements = [cost.elements for cost in config.costs]
        self.proofs = StepSumProofs(
            config.checks if config.checks is not None and config.checks.proves else None,
            context.line,
            number,
            dict(enumerate(elements)),
        )
        self.checks = StepSpotChecks(
            config.checks,
            context.reputation,
            context.line,
            number,
            roster,
            elements,
            route_taken,
        )
        self.awaited_at = now
        """Time at which all earlier steps were committed: timeouts count from then."""
        self.unwanted: set[str] = set()
        """Volunteers that were fenced for its reduce: the others end it without them, if they can."""
        self._context = context
        self._line, self._number = context.line, number
        self._roster = roster
        self._ledger = ledger
        self._timeouts = timeouts
        self._told: dict[int, m.Cover] = {}
        """Block → its part of the latest plan."""
        self._said_at = self._decided_at = self._checked_at = now
        """Times: a holder last proved something; all was proven; a spot check last went on."""
        self._waits = 0
        """Number of times a proof has timed out."""

    @property
    def under_way(self) -> bool:
        """Whether there is a plan, decided or not."""
        return self.reduce.under_way

    @property
    def decision(self) -> Mapping[int, m.BlockVote] | None:
        """The votes to commit: all alike, proven, and all spot checks over. None before."""
        proven = self.proofs.over and not self.proofs.found_false
        return self.reduce.decision if proven and self.checks.over else None

    @property
    def trouble(self) -> str | None:
        """Reason why there will be no decision; None as long as there may be one."""
        return None if self.reduce.trouble is None else f"{self.reduce.trouble} at step {self._number}"

    def plan(self, now: float) -> list[Effect]:
        """Make a new plan, once all is counted: it adds up the exact cover and replaces the plan before."""
        self.covers = self._ledger.covers()
        self.checks.void()
        ordered = self._context.members.speak(m.SAYS_ORDER, self._roster)
        runs = self._ledger.runs() if ordered else None
        told = self.reduce.make(self.covers, self._roster, now, self.proofs.choose, runs)
        self._told = {cover.block: cover for covers in told.values() for cover in covers}
        self.proofs.plan(self.reduce.plan, self._told.values())
        self._context.disputed_pairs.waited_in_vain(self.proofs.fled())
        return [Send(peer, self._plan(peer, covers)) for peer, covers in told.items()]

    def _plan(self, peer: str, covers: tuple[m.Cover, ...]) -> m.Plan:
        return m.Plan(
            line=self._line,
            step=self._number,
            plan=self.reduce.plan,
            covers=covers,
            closely=self.reduce.closely,
            marks=self.proofs.marks(peer),
        )

    # ── what holders say ────────────────────────────────────────────────────────────────────────────────────

    def receive(self, peer: str, message: m.Message, now: float) -> list[Effect]:
        """Note what `peer`, which is on the roster, says on plans and checks. Raises `ProtocolError`."""
        match message:
            case m.Reducing():
                self.reduce.moves(peer, message, now)
            case m.Missed():
                self.reduce.missed(peer, message)
            case m.Objection():
                return self.plan(now) if self.reduce.objected(peer, message) else []
            case m.Vote():
                return self._vote(peer, message, now)
            case m.Proved() | m.Testimony() if not self.proofs.over:
                before = self.proofs.silent
                effects = self.proofs.receive(peer, message)
                self._said_at = self._said_at if self.proofs.silent == before else now
                return [*effects, *self._proven(now)]
            case m.Checked() | m.Compared() | m.Shown():
                self._checked_at = now
                return [*self.checks.receive(peer, message), *self._compare()]
            case _:
                pass
        return []

    def _vote(self, peer: str, message: m.Vote, now: float) -> list[Effect]:
        """Note a holder's vote on the reduced gradients of its blocks; the last one decides."""
        if self.reduce.decision is not None:
            return []
        if self.reduce.vote(peer, message, self._roster, now):
            return self.plan(now)
        if self.reduce.decision is None:
            return []
        self._said_at, self._waits = now, 0
        return [*self.proofs.begin(), *self._proven(now)]

    def _proven(self, now: float) -> list[Effect]:
        """Make a new plan if the proofs contradict, else check suspicious contributions first."""
        if not self.proofs.over:
            return []
        if pairs := self.proofs.disputes():
            self.reduce.complaints.proven(pairs)
        if huge := self.proofs.huge():
            self.reduce.complaints.drowns(huge)
        if liars := self.proofs.contradict():
            self.reduce.complaints.contradict(liars)
        if self.proofs.found_false:
            return [] if self.reduce.complaints.pending else self.plan(now)
        self._decided_at = self._checked_at = now
        suspects = sorted(self._context.length_outliers.unusual(self.lengths)) if self.checks.wanted else []
        effects = [effect for one in suspects for effect in self.checks.suspect(one, self._contents(one))]
        return [*effects, *self._compare()]

    @property
    def lengths(self) -> Lengths:
        """Block → norm of each holder's contribution, as its reducers report it."""
        return lengths(self.reduce.votes, self._told.values())

    def _contents(self, peer: str) -> list[m.Contents]:
        """Block → ids in `peer`'s accepted slots, by the current plan."""
        return [
            m.Contents(begin=block, end=block + 1, ids=ids)
            for block, sums in sorted(self.covers.items())
            for holder, ids in sums
            if holder == peer
        ]

    def _compare(self) -> list[Effect]:
        """Compare recomputed microbatches with the decided results."""
        if self.reduce.decision is None or not self.proofs.over:
            return []
        return self.checks.compare(self.reduce.plan, self.covers, self._told.values(), self.proofs.said)

    # ── who has to go, and time ─────────────────────────────────────────────────────────────────────────────

    def to_fence(self) -> dict[str, str]:
        """Volunteers on the roster to be fenced for new complaints → reason; they become `unwanted`."""
        out = {peer: why for peer, why in self.reduce.complaints.to_fence().items() if peer in self._roster}
        self.unwanted |= out.keys()
        return out

    def left(self, peers: Sequence[str]) -> None:
        """`peers` are not on the roster any more: votes and proofs begin again."""
        for peer in peers:
            self.checks.lost(peer)
        self.proofs.void()
        self.reduce.left()

    def mute(self, now: float) -> dict[str, str]:
        """Volunteers that do not answer in time → the reason for which they are fenced."""
        mute = dict.fromkeys(self.reduce.mute(self._roster, now), "it did not vote on three plans")
        return mute | dict.fromkeys(self._unsaid(now), "it did not say what it had sent or received")

    def _unsaid(self, now: float) -> list[str]:
        """Holders that proved nothing within the timeout twice in a row: the first time all may be slow."""
        if self.proofs.over or now - self._said_at < self._timeouts.scaled(self._context.config.reduce_s):
            return []
        self._timeouts.ran_out()
        self._said_at, self._waits = now, self._waits + 1
        if self._waits < 2:
            return []
        self._timeouts.blamed()
        return sorted(self.proofs.silent & self._roster.keys())

    def tick(self, now: float) -> list[Effect]:
        """Make a plan anew that times out; end spot checks that take too long."""
        if self.reduce.decision is not None:
            if self.proofs.over:
                self._hurry(now)
        elif self.reduce.overdue(now) and self.reduce.ran_out():
            return self.plan(now)
        return []

    def _hurry(self, now: float) -> None:
        """End spot checks without progress for a plan's timeout, or that take longer than the step so far.

        A third opinion recomputes all that a volunteer counts, so it may take as long as the step.
        """
        timeout_s = self._timeouts.scaled(self._context.config.reduce_s)
        longest = max(self._decided_at - self.awaited_at, timeout_s)
        if now - self._checked_at >= timeout_s or now - self._decided_at >= timeout_s + longest:
            self.checks.expire()
