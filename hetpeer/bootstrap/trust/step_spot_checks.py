"""The spot checks of one step: their checkers, the lenders of inputs, and the outcomes (docs/trust.md). Pure.

Another holder of the same blocks computes a contribution again. Its fingerprints are compared with those of
the sums and bundles that others received. If two differ, a third decides. The commit waits, up to a time-out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.conduct.reputation import CheckDuty, CheckRules, Duty, Reputation
from hetpeer.bootstrap.state.effects import Effect, Send
from hetpeer.bootstrap.trust.checker_reports import CheckedPiece, CheckerReport, CheckRoute
from hetpeer.bootstrap.trust.spot_check import SpotCheck
from hetpeer.bootstrap.trust.verdicts import CheckOutcome, CheckVerdict
from hetpeer.stages.block.fingerprint import KEY_BYTES
from hetpeer.stages.pipeline.routes import Hop, Route, rest_of


@dataclass(slots=True)
class StepSpotChecks:
    """Spot checks of one step: in a random circle each volunteer checks the one before it."""

    rules: CheckRules | None
    """None: nothing is checked."""
    reputation: Reputation
    line: m.TermView
    step: int
    roster: Mapping[str, Range]
    """The step's own roster: its changes are seen here."""
    elements: Sequence[int]
    """Block → elements of its vector."""
    route_taken: Callable[[int], Route]
    """Id → its route."""
    _checks: dict[int, SpotCheck] = field(default_factory=dict)
    _ended: list[SpotCheck] = field(default_factory=list)
    _drawn: dict[str, bool] = field(default_factory=dict)
    """Contributing volunteer → whether its contributions are checked."""
    _unchecked: dict[str, list[CheckedPiece]] = field(default_factory=dict)
    """Contributions that wait for a checker."""
    _places: dict[str, float] = field(default_factory=dict)
    """Volunteer → its place in the circle, drawn on first use."""

    @property
    def over(self) -> bool:
        """Whether no check must be waited for."""
        return not any(check.open for check in self._checks.values())

    def take(self) -> list[SpotCheck]:
        """Newly ended checks; before all are over only those with a culprit, who may cause other disputes."""
        found_out = (CheckVerdict.CONVICTED, CheckVerdict.EVADED)
        ended = [one for one in self._ended if self.over or one.outcome.verdict in found_out]
        self._ended = [one for one in self._ended if one not in ended]
        return ended

    # ── computed once more ──────────────────────────────────────────────────────────────────────────────────

    def accepted(self, peer: str, contents: Iterable[m.Contents], refused: Collection[int]) -> list[Effect]:
        """Have accepted contributions of `peer`, except in `refused` blocks, computed again by its checker.

        The first one of the step decides, by reputation or at random, whether `peer` is checked. They wait in
        `_unchecked` until a checker is found; later ones go to the open check.
        """
        rules = self.rules
        if rules is None:
            return []
        if peer not in self._drawn:
            self._drawn[peer] = self.reputation.contributes(peer) or rules.draw() < rules.share
            if self._drawn[peer]:
                self._unchecked[peer] = []
        pieces = _pieces(contents, refused)
        if peer in self._unchecked:
            self._unchecked[peer] += pieces
            return self._begin(peer)
        check = self._open(peer)
        if check is None:
            return []
        check.accepted(pieces)
        return self._lend(check)

    @property
    def wanted(self) -> bool:
        """Whether this run has spot checks."""
        return self.rules is not None

    def suspect(self, peer: str, contents: Iterable[m.Contents]) -> list[Effect]:
        """Check all contributions of `peer`, even though it was not drawn."""
        if self._drawn.get(peer):
            return []
        self._drawn[peer] = True
        self._unchecked[peer] = _pieces(contents, ())
        return self._begin(peer)

    def _begin(self, peer: str) -> list[Effect]:
        """Begin the check of `peer` if a checker is available."""
        checker = self._checker(peer) if self._unchecked[peer] else None
        if checker is None:
            return []
        check = SpotCheck(len(self._checks) + 1, peer, checker)
        self._checks[check.number] = check
        check.accepted(self._unchecked.pop(peer))
        return self._lend(check)

    def _checker(self, peer: str) -> str | None:
        """The next volunteer in the circle that checks nobody, else (late joiners) one that checks one."""
        times = Counter(one for check in self._checks.values() for one in check.checkers)
        busy, twice = ({one for one, number in times.items() if number > least} for least in (0, 1))
        among = self._able(peer, busy) or self._able(peer, twice)
        return min(among, key=lambda other: (self._place(other) - self._place(peer)) % 1.0, default=None)

    def _third(self, check: SpotCheck) -> str | None:
        """A third checker for `check`: not yet heard, and not known for false numbers in this step."""
        assert self.rules is not None
        suspects = {one.outcome.culprit for one in self._checks.values() if one is not check}
        able = self._able(check.peer, {*check.checkers, *suspects})
        return able[int(self.rules.draw() * len(able))] if able else None

    def _able(self, peer: str, without: Collection[str]) -> list[str]:
        """Volunteers that can check `peer` and answer, except those in `without`."""
        return [
            other
            for other in fellows(peer, self.roster)
            if other not in without and not self.reputation.is_mute(other)
        ]

    def _place(self, peer: str) -> float:
        """Random place of `peer` in the circle. In a circle nobody is left with only itself to check."""
        assert self.rules is not None
        if peer not in self._places:
            self._places[peer] = self.rules.draw()
        return self._places[peer]

    def receive(self, peer: str, message: m.Checked | m.Compared | m.Shown) -> list[Effect]:
        """Handle a message of `peer` about a check."""
        check = self._checks.get(message.check)
        if check is None or not check.open:
            return []
        match message:
            case m.Checked():
                check.weighed(peer, message)
                return self._lend(check) if check.done(peer, message.id, message.begin) else []
            case m.Compared():
                check.compared(peer, message)
                return []
            case m.Shown():
                return self._shown(check, peer, message) if check.is_under(message.plan) else []

    def _open(self, peer: str) -> SpotCheck | None:
        """The check of `peer` that goes on; None if there is none."""
        return next((one for one in self._checks.values() if one.peer == peer and one.open), None)

    def _lend(self, check: SpotCheck) -> list[Effect]:
        """Ask the holders of the next pieces' inputs to send them; tell a checker that begins with data."""
        pieces = [(opinion, piece) for opinion in check.opinions for piece in opinion.next()]
        return [effect for opinion, piece in pieces for effect in self._send(check, opinion, piece)]

    def _send(self, check: SpotCheck, opinion: CheckerReport, piece: CheckedPiece) -> list[Effect]:
        """Requests for `piece`; none if they were made already."""
        before = self.route_taken(piece.id)
        route = (Hop(opinion.peer, piece.begin, piece.end), *rest_of(before, piece.end))
        lender = _holder(before, piece.begin - 1) if piece.begin else opinion.peer
        if not check.goes(
            opinion, piece, CheckRoute(lender, opinion.peer, route[1].peer if route[1:] else None)
        ):
            return []
        task = m.Task(id=piece.id, route=route)
        told = m.Check(line=self.line, step=self.step, check=check.number, tasks=(task,))
        return [Send(lender, told)]

    def lost(self, peer: str) -> None:
        """Note that contributions of `peer` are void or that it left; its checks go to others."""
        if self._drawn.get(peer):
            self._unchecked[peer] = []
        for check in self._checks.values():
            if check.open and (peer == check.peer or peer in check.checkers):
                self._unfinished(check)
                if peer != check.peer and check.outcome.verdict is CheckVerdict.LAPSED:
                    self._unchecked[check.peer] = list(check.pieces)

    def _unfinished(self, check: SpotCheck) -> None:
        """End a check that cannot go on; statements made so far still count."""
        assert self.rules is not None
        self._end(check, check.unfinished(self.rules))

    def _end(self, check: SpotCheck, outcome: CheckOutcome) -> None:
        check.outcome = outcome
        self._ended.append(check)

    # ── compared ────────────────────────────────────────────────────────────────────────────────────────────

    def void(self) -> None:
        """Note that the latest plan is void."""
        for check in self._checks.values():
            if check.open:
                check.void()

    def compare(
        self,
        plan: int,
        covers: Mapping[int, Sequence[tuple[str, tuple[int, ...]]]],
        told: Iterable[m.Cover],
        said: Callable[[str], Iterable[m.Mark]],
    ) -> list[Effect]:
        """Ask reducers, after all votes on `plan`, for fingerprints of the checked contributions in `covers`.

        `said`: peer → fingerprints of what it sent, by its own statement.
        """
        effects = [effect for peer in list(self._unchecked) for effect in self._begin(peer)]
        reducers = {cover.block: [peer for peer, _ in cover.reducers] for cover in told}
        for check in self._checks.values():
            if not check.open:
                continue
            check.spare(self._is_silent)
            if check.has_asked:
                effects += self._judge(check) if check.complete else []
                continue
            # by now it is known who counts what is next to it
            under_way = [(opinion, piece) for opinion in check.opinions for piece in opinion.under_way]
            effects += [effect for one, piece in under_way for effect in self._send(check, one, piece)]
            if not check.is_of(covers) or not check.pieces or self._is_hopeless(check):
                self._unfinished(check)
            elif check.finished:
                mute = self.reputation.is_mute
                hear = {peer for block in check.blocks for peer in reducers[block] if not mute(peer)}
                own = [mark for mark in said(check.peer) if mark.block in check.blocks]
                asked = check.ask(plan, hear, said=own, mute=mute(check.peer))
                effects += [Send(to, self._show(check, plan, peer=check.peer)) for to in asked]
                if not check.has_asked and check.computed:
                    self._unfinished(check)  # it reduces all that it sends
        return effects

    def _show(self, check: SpotCheck, plan: int, *, peer: str = "", marks: tuple[m.Mark, ...] = ()) -> m.Show:
        return m.Show(line=self.line, step=self.step, check=check.number, plan=plan, peer=peer, marks=marks)

    def _shown(self, check: SpotCheck, peer: str, message: m.Shown) -> list[Effect]:
        """Take fingerprints from `peer`."""
        blocks = check.blocks
        sound = all(
            mark.block in blocks
            and mark.begin < mark.end <= self.elements[mark.block]
            and len(mark.key) == KEY_BYTES
            for mark in message.marks
        )
        asked = check.received(peer, message.marks if sound else ())
        if asked is not None:
            return [Send(to, self._show(check, message.plan, marks=asked)) for to in check.checkers]
        known = [one for one in message.given if one.peer != peer and one.peer in self.roster]
        check.shown(peer, message.marks, known)
        return self._judge(check) if check.complete else []

    def _judge(self, check: SpotCheck) -> list[Effect]:
        """Judge a complete check: at once call a third checker if needed, else await missing statements."""
        assert self.rules is not None
        outcome, third = check.judge(self.rules), None
        if outcome.verdict is CheckVerdict.OPEN:
            third = self._third(check)
        if third is not None:
            check.third(third)
            return self._lend(check)
        if check.computed:
            self._settle(check)
        return []

    def _settle(self, check: SpotCheck) -> None:
        """Judge by the fingerprints and statements so far, without another checker."""
        assert self.rules is not None
        self.reputation.answered(check.answered)
        self._end(check, check.judge(self.rules, alone=True))

    def expire(self) -> None:
        """End checks at the time-out. If only statements are missing, the fingerprints count without them."""
        going_on = [check for check in self._checks.values() if check.open]
        self.reputation.lapsed([self._waited_for(check) for check in going_on])
        for check in going_on:
            if check.complete:
                self._settle(check)
                continue
            evades = check.has_asked and check.silent == {(check.peer, CheckDuty.EXPLAINS)}
            self._unfinished(check)
            if evades:
                check.outcome = check.outcome._replace(verdict=CheckVerdict.EVADED, culprit=check.peer)

    def _waited_for(self, check: SpotCheck) -> set[Duty]:
        """Duties that may hold `check` up."""
        awaited = {duty for by in check.opinions for duty in by.awaited}
        return awaited | check.silent if check.has_asked or not awaited else awaited

    def _is_hopeless(self, check: SpotCheck) -> bool:
        """Whether `check` waits for a peer that left or never answers; missing statements do not count."""
        if check.finished:
            return False
        return any(self._is_silent(peer) for peer, _ in self._waited_for(check))

    def _is_silent(self, peer: str) -> bool:
        """Whether `peer` left or is mute."""
        return peer not in self.roster or self.reputation.is_mute(peer)


def fellows(peer: str, roster: Mapping[str, Range]) -> list[str]:
    """Other volunteers on `roster` that hold all blocks of `peer`."""
    begin, end = roster[peer]
    return sorted(
        other for other, (first, last) in roster.items() if first <= begin and end <= last and other != peer
    )


def unchecked(roster: Mapping[str, Range]) -> list[str]:
    """Volunteers on `roster` that nobody can check, since no other one holds all their blocks."""
    return sorted(peer for peer in roster if not fellows(peer, roster))


def _holder(route: Route, block: int) -> str:
    """Volunteer that runs `block` on `route`."""
    return next(hop.peer for hop in route if hop.begin <= block < hop.end)


def _pieces(contents: Iterable[m.Contents], refused: Collection[int]) -> list[CheckedPiece]:
    """Pieces of a report: each id with its contiguous ranges of counted blocks."""
    blocks: dict[int, list[int]] = {}
    for part in contents:
        for block in range(part.begin, part.end):
            if block not in refused:
                for microbatch in part.ids:
                    blocks.setdefault(microbatch, []).append(block)
    pieces: list[CheckedPiece] = []
    for microbatch, held in sorted(blocks.items()):
        begin = last = min(held)
        for block in sorted(held)[1:]:
            if block != last + 1:
                pieces.append(CheckedPiece(microbatch, begin, last + 1))
                begin = block
            last = block
        pieces.append(CheckedPiece(microbatch, begin, last + 1))
    return pieces
