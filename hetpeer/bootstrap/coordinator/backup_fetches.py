"""Fetches of backups behind the steps, so that one that steps in has less to wait for.

Pure. A backup fetches the last checkpoint, from reliable peers, so that it has it if the run goes back to it.
Where a fetch is short beside a step, it fetches the version of the running step instead, from its holders: if
the last of them dies, the backup enters that step and nothing is lost. After each fetch it rests three times
as long as that took. Docs: planning.md, "Backups".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect, Send
from hetpeer.bootstrap.state.volunteer_state import LifeCycle, VolunteerState

BEHIND = 4
"""A backup fetches in one part of so many of its time, and of a step if volunteers send for it."""
STORED = 2
"""Newest checkpoints that reliable peers keep at least."""
FORGETS = 0.5
"""Least ratio between what two fetches in a row are taken to last: one may have met an idle line."""


@dataclass(slots=True)
class _Fetching:
    """Fetches of one backup. Times are the coordinator's monotonic seconds."""

    session: VolunteerState | None = None
    version: int | None = None
    """The version under way."""
    asked_at: float = 0.0
    took_s: float = 0.0
    """Seconds that a fetch is expected to take; 0 before the first."""
    not_before: float = 0.0

    def over(self, now: float, *, done: bool) -> None:
        """Note the end of the fetch under way; one that is given up is followed by another at once."""
        took_s = now - self.asked_at
        self.version, self.took_s = None, max(FORGETS * self.took_s, took_s)
        self.not_before = now + (BEHIND - 1) * took_s if done else now


class BackupFetches:
    """All fetches of backups in one term."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._of: dict[str, _Fetching] = {}
        self._stored: deque[int] = deque(maxlen=STORED)
        """Versions of the newest checkpoints of this term."""

    def holds(self, backup: VolunteerState, version: int, held: Sequence[m.Held], now: float) -> None:
        """Note that `backup` holds `version`, if its states are those of holders or the last checkpoint."""
        fetching = self._of.get(backup.peer)
        if fetching is not None and fetching.version == version:
            fetching.over(now, done=True)
        history = self._context.history
        known = known_digests(self._context, backup) if version == history.version else {}
        if version == history.checkpoint_version:
            known = self._stored_digests() or known
        initial = version == 0 and history.checkpoint is None
        if initial or all(known.get(one.block) == one.digest for one in held):
            backup.back_up(version, held, stored=version == history.checkpoint_version)
        else:
            backup.prepare()

    def _stored_digests(self) -> dict[int, str]:
        """Block → digest in the last checkpoint; empty before the first."""
        return dict(enumerate((self._context.history.checkpoint or {}).get("blocks", ())))

    def order(self, now: float) -> list[Effect]:
        """Orders for backups that are to fetch now."""
        members, history = self._context.members, self._context.history
        if not self._stored or self._stored[-1] != history.checkpoint_version:
            self._stored.append(history.checkpoint_version)
        self._of = {peer: self._of.get(peer, _Fetching()) for peer in sorted(members.backups)}
        orders: list[Effect] = []
        for peer, fetching in self._of.items():
            backup = members.volunteers.get(peer)
            if backup is None or backup.place is None or backup.life_cycle is not LifeCycle.PREPARED:
                fetching.version = None
                continue
            if fetching.session is not backup:
                fetching.session, fetching.version = backup, None
            version = history.version if self._is_brief(fetching, backup) else history.checkpoint_version
            if fetching.version is not None and fetching.version not in (history.version, *self._stored):
                fetching.over(now, done=False)  # nobody gives that version any more
            elif fetching.version is None and now >= fetching.not_before and not backup.has(version):
                fetching.version, fetching.asked_at, backup.warm = version, now, None
                orders.append(Send(peer, self._fetch(backup, version)))
        return orders

    def _is_brief(self, fetching: _Fetching, backup: VolunteerState) -> bool:
        """Whether holders give `backup` the current version in a small part of a step."""
        history = self._context.history
        step_s = float(history.commits.get(history.version - 1, {}).get("seconds", 0.0))
        brief = 0.0 < BEHIND * fetching.took_s < step_s
        return brief and BEHIND * self._sending_s(backup) < step_s

    def _sending_s(self, backup: VolunteerState) -> float:
        """Seconds in which holders send what `backup` fetches; infinite if a holder or a line is not known.

        0 where nobody knows how large a state is.
        """
        members, asks = self._context.members, self._context.config.asks
        sent: dict[str, float] = {}
        for block in range(*(backup.place or (0, 0))):
            holders = members.holders(block)
            if not holders:
                return math.inf
            nbytes = 0.0 if asks is None else float(asks.state[block])
            for peer in holders:
                sent[peer] = sent.get(peer, 0.0) + nbytes  # any of them may be asked for all
        lines = {peer: members.volunteers[peer].uplink for peer in sent}
        return max(
            (nbytes / lines[peer] if lines[peer] else math.inf) if nbytes else 0.0
            for peer, nbytes in sent.items()
        )

    def _fetch(self, backup: VolunteerState, version: int) -> m.Fetch:
        """The order; holders are asked for no version that reliable peers have."""
        members, history = self._context.members, self._context.history
        blocks = range(*(backup.place or (0, 0)))
        if version == history.checkpoint_version:
            sources: dict[int, tuple[str, ...]] = dict.fromkeys(blocks, ())
            digests = {block: digest for block, digest in self._stored_digests().items() if block in blocks}
        else:
            sources = {block: tuple(members.holders(block)) for block in blocks}
            digests = known_digests(self._context, backup)
        line = self._context.line
        return m.Fetch(line=line, version=version, sources=sources, digests=digests, backup=True)


def known_digests(context: CoordinatorContext, volunteer: VolunteerState) -> dict[int, str]:
    """Block of its place → digest of the current state, as far as holders or the checkpoint say."""
    blocks = range(*(volunteer.place or (0, 0)))
    digests: dict[int, str] = {}
    for holder in context.members.ready():
        digests |= {block: digest for block, digest in holder.digests.items() if block in blocks}
    return digests | {block: digest for block, digest in context.history.digests.items() if block in blocks}
