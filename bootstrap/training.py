"""One step at the coordinator: from Begin over the exact cover and the reduce plan to the decision.

Pure. It hands out ids, keeps the books (ledger.py), makes plans and counts votes; what the outcome means for the run is
the coordinator's business: it looks at `decision`, `trouble` and `evaluated_only` after each event.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.decisions import CoordinatorConfig, Effect, Send
from hetpeer.bootstrap.ledger import StepLedger
from hetpeer.bootstrap.membership import Membership, Range
from hetpeer.bootstrap.routing import assign_routes
from hetpeer.stages.execution.routes import Route, cheapest_path, splice

MAX_FAILURES = 3
"""A microbatch that failed so often, at different volunteers where there are some, halts the run and is named."""
MAX_PLANS = 3


class CoordinatedStep:
    """Step `number` on `line`, with the ready members as they are now."""

    def __init__(
        self, config: CoordinatorConfig, members: Membership, line: m.Line, number: int, now: float
    ) -> None:
        train = range(config.microbatches) if number < config.steps else range(0)
        due = number % config.evaluate_every == 0 or number == config.steps
        first = config.microbatches
        evaluation = range(first, first + config.evaluation_microbatches) if due else range(0)
        self.number = number
        self.began_at = now
        self.roster = members.roster()
        self.ledger = StepLedger(train, evaluation, members.blocks)
        self.plan = 0
        self.reducing = False
        self.decision: Mapping[int, m.BlockVote] | None = None
        """Votes of all holders on the reduced gradient of each block: the step is to be committed."""
        self.trouble: str | None = None
        """Why the run cannot go on."""
        self._config = config
        self._line = line
        self._blocks = members.blocks
        self._incarnations = {peer: members.volunteers[peer].incarnation for peer in self.roster}
        self._routes = assign_routes((*train, *evaluation), self.roster, members.blocks, members.speeds())
        self._attempts: dict[int, int] = {}
        self._failures: dict[int, list[str]] = {}
        self._progress_at = now
        self._plan_at = now

    def begin(self) -> list[Effect]:
        """Tell everybody who takes part, and hand out the first routes."""
        return [
            Send(
                peer,
                m.Begin(
                    line=self._line,
                    step=self.number,
                    microbatches=self._config.microbatches,
                    roster=dict(self.roster),
                    incarnations=self._incarnations,
                    tasks=self._tasks(self._routes, peer),
                ),
            )
            for peer in self.roster
        ]

    @property
    def evaluated_only(self) -> bool:
        """Whether this was an evaluation of the final state without training, and it is complete."""
        return not self.ledger.ids and self.ledger.complete()

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────

    def sealed(self, peer: str, message: m.Sealed, now: float) -> list[Effect]:
        """A holder's report of a slot: block by block it counts or not."""
        verdict = self.ledger.report(peer, message.slot, message.contents, message.losses)
        settled = m.Settled(line=self._line, step=self.number, slot=message.slot, refused=verdict.refused)
        effects: list[Effect] = [Send(peer, settled)]
        for rival, blocks in verdict.evicted.items():
            evict = m.Evict(line=self._line, step=self.number, blocks=tuple(blocks))
            effects.append(Send(rival, evict))
        if verdict.progress:
            self._progress_at = now
        return [*effects, *self._hand_out(verdict.reopened), *self._advance(now)]

    def evaluated(self, message: m.Evaluated, now: float) -> list[Effect]:
        """Losses of evaluation microbatches."""
        if not self.ledger.evaluated(message.losses):
            return []
        self._progress_at = now
        return self._advance(now)

    def failed(self, peer: str, message: m.Failed, now: float) -> list[Effect]:
        """`peer` could not compute a microbatch: others are to, and if they cannot either, the run is in trouble."""
        if message.id not in self._routes:
            return []
        failed = self._failures.setdefault(message.id, [])
        failed.append(peer)
        self._progress_at = now
        if len(failed) >= MAX_FAILURES:
            times = f"failed {len(failed)} times"
            self.trouble = f"microbatch {message.id} of step {self.number} {times}: {message.why}"
            return []
        others = {p: r for p, r in self.roster.items() if p not in failed}
        if cheapest_path(others, 0, self._blocks, {}) is None:
            others = self.roster
        return self._hand_out({message.id}, others)

    def without(self, peer: str, now: float) -> list[Effect]:
        """`peer` takes no further part; the caller has checked that every block keeps a holder."""
        lost = self.ledger.lose(peer)
        self._progress_at = now
        gone = m.Gone(line=self._line, peers=(peer,))
        effects: list[Effect] = [Send(other, gone) for other in sorted(self.roster)]
        orphans = {i for i, route in self._routes.items() if route[0].peer == peer}
        effects += self._hand_out(orphans)
        if self.reducing and not lost and self.ledger.complete():
            return effects + self._make_plan(now)
        self.reducing = False
        return effects + self._advance(now)

    def tick(self, now: float) -> list[Effect]:
        """Hand out again what is not counted for too long, make a plan anew that is not voted on for too long."""
        if self.reducing:
            return self._make_plan(now) if self._overdue(now) and self.plan < MAX_PLANS else []
        if now - self._progress_at < self._patience(self._config.stall_s):
            return []
        self._progress_at = now
        return self._hand_out(self.ledger.undone())
