"""One cluster of a grouped run: it has a coordinator, and falls apart where it has nothing to go back to.

Pure. It is *forming* until all its places are taken by prepared volunteers; a planner may divide all that
wait anew (formation.py). Then the run *founds* it from a checkpoint; it fetches that and trains. From then on
its places have any number of holders. When a block has lost its last holder for longer than the grace time,
it goes back to the last checkpoint, if that is its own, or dissolves (docs/grouped.md, "Going back").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.coordinator.commits import last_message
from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import AT_BARRIER, Effect, Send
from hetpeer.bootstrap.state.failed_microbatches import room_s
from hetpeer.bootstrap.state.volunteer_state import LifeCycle, VolunteerState

STALLS = 6
"""Stalls in a row, each twice as long, until a step is given up: after 15 min with nothing counted."""


class Share(Protocol):
    """Questions of a cluster about the others."""

    @property
    def may_go_back(self) -> bool:
        """Whether the others can do with it at its own checkpoint, and that keeps more than dissolving."""


class Cluster:
    """Cluster `context.line.cluster`: its coordinator and what differs from a whole run (`RunPolicy`)."""

    whole_run = False

    def __init__(self, context: CoordinatorContext, share: Share, now: float, *, founded: bool) -> None:
        self.context = context
        self._share = share
        self.members, self.history = context.members, context.history
        self.founded = founded
        self.dissolved: str | None = None
        """Reason why the cluster has fallen apart; None as long as it stands."""
        self.given_up: Mapping[str, Any] = {}
        """Log fields of the steps that were under way when the cluster fell apart."""
        self._fetches = False
        """Whether the cluster was founded in this term and has not been whole since."""
        self._begun = False
        """Whether the cluster has been whole in this term, or has gone back: nobody else brings its state."""
        self._unable: set[str] = set()
        """Volunteers that could not do their work: the cluster does not wait for what they alone hold."""
        self.late = False
        """Whether the cluster fell apart because its holders did not fetch their blocks in time."""
        self.coordinator = Coordinator(context, now, policy=self)
        self._machine = self.coordinator.machine

    @property
    def line(self) -> m.TermView:
        """Term, view and number of the cluster."""
        return self.context.line

    @property
    def number(self) -> int:
        """Number of the cluster, which no other cluster of the run ever has."""
        return self.line.cluster

    @property
    def complete(self) -> bool:
        """Whether all places are taken by volunteers that are prepared and do not rest."""
        present = self.members.volunteers.values()
        ready = [v.place for v in present if v.life_cycle is not LifeCycle.JOINING and not self.rests(v.peer)]
        return not self.members.uncovered(
            {str(n): place for n, place in enumerate(ready) if place is not None}
        )

    @property
    def whole(self) -> bool:
        """Whether the cluster is founded and all its blocks are held."""
        return self.founded and not self.members.uncovered()

    @property
    def at_rest(self) -> bool:
        """Whether the cluster is at a step barrier."""
        return self.context.state in AT_BARRIER

    @property
    def mean(self) -> int | None:
        """Version at which the mean of its averaging is to be installed, as steps have begun behind it."""
        return self._machine.steps.mean

    @property
    def takes_mean(self) -> bool:
        """Whether a mean can be installed now: between two steps, or where one was given its place."""
        return self.at_rest or self._machine.steps.mean_is_next

    @property
    def admits(self) -> bool:
        """Whether one more holder of any block can be used, and gets its state: from holders or the store."""
        return self._begun and self.dissolved is None and (self.whole or self.history.stored)

    @property
    def gaps(self) -> list[Range]:
        """Places with missing blocks to which nobody is on the way; the store has their state."""
        if self.whole or not self.admits:
            return []
        coming = {v.peer: v.place for v in self.members.volunteers.values() if v.place and not v.slow}
        missing = set(self.members.uncovered(coming))
        return [place for place in self.members.layout(self.number) if missing.intersection(range(*place))]

    def takes_back(self, peer: str, place: Range) -> bool:
        """Whether `peer` can have `place` in a new session."""
        known = self.members.volunteers.get(peer)
        own = known is not None and known.place == place
        free = any((p.open or own) and (p.begin, p.end) == place for p in self.members.places())
        return free and self.dissolved is None

    def expects_no_more(self, peer: str, now: float) -> None:
        """Note that `peer` is elsewhere: it does not bring back what it held here."""
        self._machine.barrier.awaits_no_more(peer, now)

    def end_session(self, peer: str, now: float) -> list[Effect]:
        """End the known session of `peer`: a new one has begun."""
        return self._machine.departures.lose({peer: "came back as a new session"}, now)

    def enter(self, volunteer: VolunteerState, claim: m.Claim) -> list[VolunteerState] | None:
        """Give an unassigned volunteer the place it claims. Returns slow ones that lost it; None: not given.

        In a training cluster it is one more holder. One that held a place there comes back by its Hello.
        """
        place = claim.begin, claim.end
        yielding = self._yields_to(volunteer)
        if self.founded and not self.admits:
            return None
        if not self.members.claim(volunteer, claim.cluster, place, yielding=yielding):
            return None
        here = () if self.founded else self.members.volunteers.values()
        before = [v.peer for v in here if v.place == place]
        spared = [self.members.volunteers.pop(peer) for peer in before]
        self.members.volunteers[volunteer.peer] = volunteer
        return spared

    def places_for(self, volunteer: VolunteerState) -> tuple[m.Place, ...]:
        """Places of the cluster; those that `volunteer` may claim are open."""
        return self.members.places(yielding=self._yields_to(volunteer))

    def rests(self, peer: str) -> bool:
        """Whether `peer` is given nothing for now."""
        return peer in self.context.failures.resting

    def _yields_to(self, volunteer: VolunteerState) -> bool:
        """Whether slow volunteers make room for `volunteer`; resting ones would take each other's places."""
        return not self.rests(volunteer.peer)

    @property
    def forming(self) -> bool:
        """Whether the cluster is not founded and has an open place."""
        return not self.founded and self.dissolved is None and any(p.open for p in self.members.places())

    def seat(self, seats: Sequence[tuple[VolunteerState, Range]]) -> list[Effect]:
        """Cut the cluster, in which nobody is, like this and give `seats`; tells those that get a new one."""
        self.members.recut([place for _, place in seats])
        told: list[Effect] = []
        for volunteer, place in seats:
            told += self.take(volunteer, place)
        return told

    def take(self, volunteer: VolunteerState, place: Range) -> list[Effect]:
        """Give `place` to a volunteer that is in no other cluster; tells it unless it had this very place."""
        self.members.volunteers[volunteer.peer] = volunteer
        if (volunteer.cluster, volunteer.place) == (self.number, place):
            return []
        volunteer.cluster, volunteer.place = self.number, place
        volunteer.rejoin()
        return [Send(volunteer.peer, m.Granted(line=self.line, begin=place[0], end=place[1]))]

    def release(self, replicas: Sequence[VolunteerState], now: float) -> list[Effect]:
        """Let volunteers go whose blocks others hold; what they have computed of a step is done again."""
        effects = self._machine.departures.left_behind(replicas, now)
        for replica in replicas:
            self.members.volunteers.pop(replica.peer, None)
        return effects

    def found(self, now: float, sync_factor: int) -> list[Effect]:
        """Begin from the checkpoint that the log names; it must arrive within `sync_factor` sync timeouts."""
        self.founded = self._fetches = self.members.shared = True
        self._machine.barrier.await_until((), now + sync_factor * self.context.config.sync_s)
        return self.go_on(now)

    def begins(self, now: float) -> None:
        """Note that all blocks are held: from now on one may wait for another holder, for the grace time."""
        self._fetches, self._begun = False, True
        self._machine.barrier.await_until((), now)

    def go_on(self, now: float) -> list[Effect]:
        """Cross the barrier, or begin a step beside those that run: there may be something to do again."""
        return self._machine.at_barrier(now) if self.at_rest else self._machine.overlap(now)

    def begins_anew(self, now: float) -> list[Effect]:
        """Give up the steps under way, which are behind a mean that does not come."""
        return self._machine.go_back(self.history.version, "the others average without it", now)

    def moves_on(self) -> None:
        """Keep the agreed digests of this version: an averaging is about to make the next one."""
        self._machine.checkpoints.settle()

    def installs(self, members: Iterable[str], now: float) -> list[Effect]:
        """Install the averaging that the log has just added to its history.

        `members` took part in it. Holders that came later have no part of the mean: they fetch that version.
        """
        roster, message = frozenset(members), last_message(self.history)
        assert message is not None
        late = [holder for holder in self.members.ready() if holder.peer not in roster]
        told: list[Effect] = [Send(peer, message) for peer in sorted(roster)]
        self._machine.steps.timeouts.committed()
        self.members.outdate(roster)
        return [*told, *self._machine.departures.left_behind(late, now), *self._machine.installed(now)]

    def can_install(self, members: Mapping[str, Range]) -> bool:
        """Whether `members`, which have the mean, hold all blocks."""
        return not self.members.uncovered(members)

    def goes_without_mean(self, now: float) -> list[Effect]:
        """Go on in a new view from the version that is held: of some block nobody is left with the mean."""
        return self._machine.without_holder("nobody is left that has the mean of all blocks", now)

    def fall_apart(self, why: str) -> list[Effect]:
        """Dissolve for the reason `why`."""
        return self._machine.dissolve(why)

    def fence(self, peers: Sequence[str], why: str, now: float) -> list[Effect]:
        """Fence `peers` for the reason `why`."""
        return self._machine.departures.fence(dict.fromkeys(peers, why), now)

    # ── RunPolicy: where a whole run decides differently ────────────────────────────────────────────────────

    @property
    def may_begin(self) -> bool:
        """Whether the cluster is founded and has not fallen apart."""
        return self.founded and self.dissolved is None

    @property
    def kept_version(self) -> int:
        """That of its own checkpoint or after its last averaging: what it had then, others have as well."""
        return max(max(self.history.averages, default=-1) + 1, self.history.sealed or 0)

    def coming_for(self, missing: Sequence[int]) -> Sequence[VolunteerState]:
        """Newcomers that load the graphs of the `missing` blocks, whose state is in the store.

        Their step begins meanwhile, and they take the leftovers. Holders that are to report what they have
        take no time, so a step waits for them.
        """
        here = [v for v in self.members.volunteers.values() if v.place is not None and not v.slow]
        coming = [v for v in here if v.life_cycle is LifeCycle.JOINING and not v.worked]
        reporting = any(v.worked and v.life_cycle is not LifeCycle.READY for v in here)
        if not self._begun or not self.history.stored or reporting or not self.members.roster():
            return ()
        covered = {block for v in coming for block in range(*(v.place or (0, 0)))}
        return coming if covered.issuperset(missing) else ()

    def goes_back_to(self) -> int | None:
        """Version of the last checkpoint, if it is this cluster's and older than what is lost; else None, as
        if nobody is left.

        From then on its places are open to newcomers: the state comes from the store.
        """
        stored = self.history.sealed
        nowhere = stored is None or self.history.stored or not self.members.volunteers
        if self._fetches or nowhere or not self._share.may_go_back:
            return None
        self._begun = True
        return stored

    def gap_is_final(self, now: float) -> str | None:
        """Reason to wait for nobody any longer, or None. Volunteers that were to fetch a state rest then."""
        until = self._machine.barrier.return_by
        fetched = self.admits and not self.gaps  # what is missing comes from the store
        if now <= until + (self.context.config.sync_s if fetched else 0.0):
            return None
        if self._fetches:
            self.late = True
            behind = [v.peer for v in self.members.volunteers.values() if v.life_cycle is not LifeCycle.READY]
            self.context.failures.idle(behind, room_s(self.context.config), now)
        return "the holders of its blocks did not come in time"

    def is_stuck(self, stalls: int, now: float) -> str | None:
        """Reason to give the step up after `stalls` attempts in vain, or None; its volunteers rest then."""
        if self.dissolved is not None or stalls < STALLS:
            return None
        self.context.failures.idle(self.members.volunteers, room_s(self.context.config), now)
        return "nothing was computed for too long"

    def vacated(self, volunteers: Sequence[VolunteerState]) -> list[int]:
        """Blocks of `volunteers` for which nobody else is here and nobody is awaited.

        While it fetches: newcomers do as well in a new cluster, and nothing is stored until it is whole. Or
        if they could not do their work: others are given the batch, in clusters of their own.
        """
        leaving = {v.peer for v in volunteers}
        if not self._fetches and not leaving <= self._unable:
            return []
        places = [(v.peer, v.place) for v in self.members.volunteers.values() if v.place is not None]
        here = {block for peer, place in places if peer not in leaving for block in range(*place)}
        return sorted({block for peer, place in places if peer in leaving for block in range(*place)} - here)

    def rest(self, peers: Sequence[str], now: float) -> None:  # noqa: ARG002 - nobody rests
        """Note that `peers` could not do their work; none of them rests, as others are given the batch."""
        self._unable.update(peers)

    def dissolve(self, why: str, given_up: Mapping[str, Any]) -> None:
        """Note that the cluster falls apart; `given_up`: log fields of the steps that it gives up."""
        self.dissolved, self.given_up = why, given_up
