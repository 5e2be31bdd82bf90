"""How the sums of one step come about: plans, votes and spot checks, until there is a decision.

Pure. What there is to sum, and when all of it is counted, is the step's business (training.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.decisions import Effect, Send
from hetpeer.bootstrap.guard import Lengths, lengths
from hetpeer.bootstrap.ledger import StepLedger
from hetpeer.bootstrap.membership import Range
from hetpeer.bootstrap.patience import Pace
from hetpeer.bootstrap.reduce import Reduce, Sums
from hetpeer.bootstrap.reign import Reign
from hetpeer.bootstrap.spotchecks import SpotChecks
from hetpeer.stages.execution.routes import Route


class Summing:
    """Of step `number`; `roster` is the step's own, as it changes, `trodden` says which way an id has gone."""

    def __init__(
        self,
        reign: Reign,
        number: int,
        roster: Mapping[str, Range],
        ledger: StepLedger,
        trodden: Callable[[int], Route],
        pace: Pace,
        now: float,
    ) -> None:
        config = reign.config
        checked = config.checks is not None and config.checks.share > 0
        self.reduce = Reduce(config, reign.members.uplinks(), reign.quarrels, pace, now, guarded=checked)
        self.covers: Mapping[int, Sequence[Sums]] = {}
        """Block → whose slots, with which ids, the latest plan adds."""
        self.checks = SpotChecks(
            config.checks,
            reign.standings,
            reign.line,
            number,
            roster,
            [cost.elements for cost in config.costs],
            trodden,
        )
        self.awaited_at = now
        """Since when the step is waited for: all before it are committed."""
        self.unwanted: set[str] = set()
        """Who was turned out of its reduce: the others are to end it among themselves, if they can."""
        self._line, self._number = reign.line, number
        self._roster = roster
        self._ledger = ledger
        self._guard = reign.guard
        self._pace = pace
        self._reduce_s = config.reduce_s
        self._told: dict[int, m.Cover] = {}
        """Block → its part of the latest plan."""
        self._decided_at = self._checked_at = now
        """When all had voted, and when a spot check last went on."""

    @property
    def under_way(self) -> bool:
        """Whether there is a plan, decided or not."""
        return self.reduce.under_way

    @property
    def decision(self) -> Mapping[int, m.BlockVote] | None:
        """What is to be committed: all have voted alike, and nothing is left to be checked."""
        return self.reduce.decision if self.checks.over else None

    @property
    def trouble(self) -> str | None:
        """Why there will be no decision."""
        return None if self.reduce.trouble is None else f"{self.reduce.trouble} at step {self._number}"

    def plan(self, now: float) -> list[Effect]:
        """All is counted: a plan that adds it up, in place of the one before."""
        self.covers = self._ledger.covers()
        self.checks.void()
        told = self.reduce.make(self.covers, self._roster, now)
        self._told = {cover.block: cover for covers in told.values() for cover in covers}
        return [Send(peer, self._plan(covers)) for peer, covers in told.items()]

    def _plan(self, covers: tuple[m.Cover, ...]) -> m.Plan:
        return m.Plan(
            line=self._line,
            step=self._number,
            plan=self.reduce.plan,
            covers=covers,
            closely=self.reduce.closely,
        )

    # ── what holders say ─────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, peer: str, message: m.Message, now: float) -> list[Effect]:
        """A word of `peer`, who is on the roster, on plans and spot checks. Raises `ProtocolError` for what no honest peer says."""
        match message:
            case m.Reducing():
                self.reduce.moves(peer, message, now)
            case m.Missed():
                self.reduce.missed(peer, message)
            case m.Objection():
                return self.plan(now) if self.reduce.objected(peer, message) else []
            case m.Vote():
                return self._vote(peer, message, now)
            case m.Checked() | m.Compared() | m.Shown():
                self._checked_at = now
                return [*self.checks.receive(peer, message), *self._compare()]
            case _:
                pass
        return []

    def _vote(self, peer: str, message: m.Vote, now: float) -> list[Effect]:
        """A holder's word on the reduced gradients of its blocks; the last one decides."""
        if self.reduce.vote(peer, message, self._roster):
            return self.plan(now)
        if self.reduce.decision is None:
            return []
        self._decided_at = self._checked_at = now
        suspects = sorted(self._guard.unusual(self.lengths)) if self.checks.wanted else []
        effects = [effect for one in suspects for effect in self.checks.suspect(one, self._contents(one))]
        return [*effects, *self._compare()]

    @property
    def lengths(self) -> Lengths:
        """How long what everybody counts is, by those who have added it up."""
        return lengths(self.reduce.votes, self._told.values())

    def _contents(self, peer: str) -> list[m.Contents]:
        """What `peer` counts."""
        return [
            m.Contents(begin=block, end=block + 1, ids=ids)
            for block, sums in sorted(self.covers.items())
            for holder, ids in sums
            if holder == peer
        ]

    def _compare(self) -> list[Effect]:
        """The sums are decided: what was computed once more is compared with what they are made of."""
        if self.reduce.decision is None:
            return []
        return self.checks.compare(self.reduce.plan, self.covers, self._told.values())

    # ── who has to go, and time ──────────────────────────────────────────────────────────────────────────────────

    def turned_out(self) -> dict[str, str]:
        """Who is to leave because of what came of the plans, with the reason for each."""
        out = {peer: why for peer, why in self.reduce.complaints.turned_out().items() if peer in self._roster}
        self.unwanted |= out.keys()
        return out

    def left(self, peers: Sequence[str]) -> None:
        """`peers` are not on the roster any more: who has voted may have to vote again."""
        for peer in peers:
            self.checks.lost(peer)
        self.reduce.left()

    def tick(self, now: float) -> list[Effect]:
        """Make a plan anew that is not voted on for too long; do not wait for spot checks for ever."""
        if self.reduce.decision is not None:
            self._hurry(now)
        elif self.reduce.overdue(now) and self.reduce.ran_out():
            return self.plan(now)
        return []

    def _hurry(self, now: float) -> None:
        """Spot checks are not waited for longer than a plan would be while nothing comes of them, and no longer than it took to get so far:
        a third opinion is all that somebody counts, computed once more.
        """
        patience = self._pace.patience(self._reduce_s)
        longest = max(self._decided_at - self.awaited_at, patience)
        if now - self._checked_at >= patience or now - self._decided_at >= patience + longest:
            self.checks.expire()
