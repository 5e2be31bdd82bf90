"""Holders whose states of a block differ from those of most: fenced, and banned after the third time.

Pure. trust/state_agreement.py says whose states differ (docs/trust.md, "Agreement on states"); this is what
follows for the volunteers, the checkpoint and the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.checkpoint_collection import CheckpointCollection
from hetpeer.bootstrap.coordinator.commits import ban_records
from hetpeer.bootstrap.coordinator.departures import Departures
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.bootstrap.trust.state_agreement import StateAgreement


class StateDisputes:
    """Disputes about states in one term. `roll_back`: goes back to a checkpoint for a reason, at a time."""

    def __init__(
        self,
        context: CoordinatorContext,
        agreement: StateAgreement,
        checkpoints: CheckpointCollection,
        departures: Departures,
        roll_back: Callable[[str, float], list[Effect]],
    ) -> None:
        self._context = context
        self._agreement = agreement
        self._checkpoints = checkpoints
        self._departures = departures
        self._roll_back = roll_back

    def hear(self, volunteer: VolunteerState, held: Sequence[m.Held], now: float) -> list[Effect]:
        """Take `volunteer`'s digests of the states that it holds of the current version."""
        self._agreement.hear(volunteer, held)
        return self.judge(now)

    def judge(self, now: float, *, last: bool = False) -> list[Effect]:
        """Fence holders of another state than most; roll back on a tie. `last`: wait for no silent holder."""
        found = self._agreement.judge(last=last)
        out = dict.fromkeys(sorted(found.wrong), "its state is not that of most holders")
        effects = self._fence(out, found.made, now) if out else []
        if found.torn is None:
            return effects
        disputed_pairs, line = self._context.disputed_pairs, self._context.line
        why = f"holders of block {found.torn[0]} have different states"
        one = disputed_pairs.blamed(found.torn[1])
        disputed_pairs.fenced(one, shunned=False)
        disputed_pairs.waited_in_vain([one])
        effects += self._departures.fence({one: why}, now)
        if self._context.line == line:
            effects += self._roll_back(why, now)
        self._checkpoints.soon()
        return effects

    def judge_uploads(self, now: float) -> list[Effect]:
        """Fence uploaders to the checkpoint whose state is not the agreed one; the checkpoint fails."""
        false = self._checkpoints.false(now)
        return self._fence(false, false, now) if false else []

    def _fence(self, peers: Mapping[str, str], liars: Collection[str], now: float) -> list[Effect]:
        """Fence `peers` (peer → reason). `liars` among them are banned after the third time."""
        for peer in liars:
            self._context.disputed_pairs.fenced(peer, shunned=True)
        banned = ban_records(self._context, self._context.history.version - 1, peers)
        return [*banned, *self._departures.fence(peers, now)]
