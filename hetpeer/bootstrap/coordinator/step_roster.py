"""The volunteers of one step, and the messages that they get in its name.

Pure. Members that are ready when the step begins are told the whole roster. A volunteer that enters later
introduces itself to those that wait for it; it is announced to everybody only if it shares others' work, or
if the step stands still: n announcements at once would be n² messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.state.effects import Effect, Send


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """Facts about a step that do not change while it runs, as `Begin` tells them."""

    line: m.TermView
    number: int
    batch: int
    microbatches: int
    behind: int
    mean: int | None
    blocks: int
    targets: Mapping[str, float]
    """Peer → seconds that its links are to take for a microbatch; others get the longest of these."""
    weights: tuple[float, ...]
    """Weight of each training microbatch in the mean loss; empty: its samples."""


class StepRoster:
    """Volunteers of a step with these `terms`. `places`: peer → its blocks, as it changes."""

    def __init__(self, terms: StepTerms, places: dict[str, Range], incarnations: Mapping[str, int]) -> None:
        self.places = places
        self._terms = terms
        self._incarnations = {peer: incarnations[peer] for peer in places}
        self._entries = 0
        self._entrants: dict[str, m.Entrant] = {}
        """Late joiners that are not announced to everybody yet."""

    # ── coming and going ────────────────────────────────────────────────────────────────────────────────────

    def begin(self, tasks: Mapping[str, tuple[m.Task, ...]]) -> list[Effect]:
        """Begin messages for the whole roster; `tasks`: peer → the microbatches whose first hop it is."""
        return [Send(peer, self._begin(peer, tasks.get(peer, ()), entry=0)) for peer in self.places]

    def enter(self, peer: str, incarnation: int, place: Range) -> Effect:
        """`peer` takes part from now on: its Begin message."""
        self._entries += 1
        self.places[peer], self._incarnations[peer] = place, incarnation
        self._entrants[peer] = m.Entrant(peer=peer, incarnation=incarnation, begin=place[0], end=place[1])
        return Send(peer, self._begin(peer, (), self._entries))

    def _begin(self, peer: str, tasks: tuple[m.Task, ...], entry: int) -> m.Begin:
        """Begin message for `peer`; `entry`: number of its late entry, 0 for the roster's first members."""
        terms = self._terms
        return m.Begin(
            line=terms.line,
            step=terms.number,
            batch=terms.batch,
            microbatches=terms.microbatches,
            roster=dict(self.places),
            incarnations=dict(self._incarnations),
            tasks=tasks,
            target=terms.targets.get(peer, max(terms.targets.values(), default=0.0)),
            behind=terms.behind,
            mean=terms.mean,
            entry=entry,
            weights=terms.weights if self.places[peer][1] == terms.blocks else (),
        )

    def leave(self, peers: Iterable[str]) -> list[str]:
        """Strike `peers` off the roster; returns those that were on it."""
        left = [peer for peer in peers if self.places.pop(peer, None) is not None]
        for peer in left:
            del self._incarnations[peer]
            self._entrants.pop(peer, None)
        return left

    def make_known(self) -> list[Effect]:
        """Announce late joiners to everybody: they may not have found all peers that wait for them."""
        entrants, self._entrants = tuple(self._entrants.values()), {}
        joined = m.Joined(line=self._terms.line, step=self._terms.number, entrants=entrants)
        return [Send(peer, joined) for peer in sorted(self.places)] if entrants else []

    # ── their work ──────────────────────────────────────────────────────────────────────────────────────────

    def hand_out(self, tasks: Mapping[str, tuple[m.Task, ...]]) -> list[Effect]:
        """Tell first hops of microbatches that are handed out again; `tasks`: first hop → its own."""
        return [self._reroute(first, own) for first, own in tasks.items()]

    def urge(self) -> list[Effect]:
        """Ask everybody to report what is done."""
        return [self._reroute(peer, ()) for peer in sorted(self.places)]

    def _reroute(self, first: str, tasks: tuple[m.Task, ...]) -> Effect:
        return Send(first, m.Reroute(line=self._terms.line, step=self._terms.number, tasks=tasks))

    def settle(self, peer: str, slot: int, refused: tuple[int, ...]) -> Effect:
        """Tell `peer` at which blocks its `slot` does not count."""
        terms = self._terms
        return Send(peer, m.Settled(line=terms.line, step=terms.number, slot=slot, refused=refused))

    def evict(self, peer: str, blocks: Iterable[int]) -> Effect:
        """Tell `peer` to drop its accepted slots at `blocks`: they count no more."""
        terms = self._terms
        return Send(peer, m.Evict(line=terms.line, step=terms.number, blocks=tuple(blocks)))
