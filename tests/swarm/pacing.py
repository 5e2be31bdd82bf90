"""Processes that wait longer or shorter than elsewhere, or for something else; called as what is in
tampering.py.

The one kind makes a test short; the other makes it say on a busy machine what it says on an idle one.
"""

import time
from weakref import WeakSet


def impatient() -> None:
    """A volunteer that gives up missing data within a second."""
    from hetpeer.peer.preparation import data_source

    data_source.TRIES, data_source.RETRY_S = 2, 0.5


def gives_up_soon() -> None:
    """A volunteer that tries twice where nobody answers."""
    from hetpeer.peer.arrival import find_run

    find_run.ROUNDS = 2


def expects_nobody() -> None:
    """A coordinator that leaves the place of who fails alone to others for four seconds each time, and not
    for minutes.
    """
    from hetpeer.bootstrap.coordinator import run_policy, step_verdicts

    run_policy.room_s = step_verdicts.room_s = lambda _config: 4.0


def soon_calm() -> None:
    """A reliable peer that waits for who has gone, or for others, for five seconds only before it gives
    their blocks away.
    """
    from hetpeer.peer.reliable import plan_proposer, proposal_timing

    settled_s, look = proposal_timing.SETTLED_S, plan_proposer.PlanProposer._look

    async def hasty(self, service, core):
        missed = core.missing_blocks and core.history.departures
        proposal_timing.SETTLED_S = 5.0 if missed else settled_s
        await look(self, service, core)

    plan_proposer.LOOK_S, plan_proposer.PlanProposer._look = 1.0, hasty


def soon_enough() -> None:
    """A reliable peer of a grouped run that looks after those who wait in a forming cluster after five
    seconds.
    """
    from hetpeer.peer.reliable import plan_proposer, proposal_timing

    plan_proposer.LOOK_S, proposal_timing.SETTLED_S = 1.0, 5.0


def slow_device(seconds: str) -> None:
    """A volunteer whose device needs so many seconds more for each block of each microbatch."""
    from hetpeer.stages.worker.holding.held_block import HeldBlock

    fold = HeldBlock.fold

    def slowly(self, *work):
        time.sleep(float(seconds))
        return fold(self, *work)

    HeldBlock.fold = slowly


def begins_with(count: str) -> None:
    """A coordinator that begins no step before so many volunteers are ready: nobody has the run to itself
    because another one starts slowly.
    """
    from hetpeer.bootstrap.state.membership import Membership

    uncovered, clusters = Membership.uncovered, WeakSet()
    begun = False

    def too_few(self, roster=None):
        nonlocal begun
        clusters.add(self)
        begun = begun or sum(len(one.roster()) for one in clusters) >= int(count)
        missing = uncovered(self, roster)
        return missing if missing or begun or roster is not None else list(range(self.blocks))

    Membership.uncovered = too_few


def even_handed() -> None:
    """A coordinator for which all are as fast: what a busy machine measures may leave somebody without
    work.
    """
    from hetpeer.bootstrap.coordinator import coordinator, step

    rates = step.rates
    step.rates = coordinator.rates = lambda ready, costs: dict.fromkeys(rates(ready, costs), 1.0)


def patient() -> None:
    """A coordinator that gives up nobody because the machine is busy."""
    from hetpeer.bootstrap.state import effects

    config = effects.CoordinatorConfig
    effects.CoordinatorConfig = lambda **known: config(
        **{**known, "lease_s": 60.0, "grace_s": 20.0, "return_s": 90.0}
    )


def polite() -> None:
    """A volunteer that takes its time to say farewell."""
    from hetpeer.peer.daemon import leaving

    leaving.FAREWELL_S = 30.0


def never_impatient() -> None:
    """A coordinator that hands nothing out again only because time has passed."""
    from hetpeer.bootstrap.coordinator.step import CoordinatedStep

    CoordinatedStep.is_overdue = lambda self, now: False


def hasty_stand_in() -> None:
    """A reliable peer that waits for others for a second only, once a step has begun."""
    from hetpeer.peer.reliable import stand_in

    is_wanted = stand_in.StandIn._is_wanted

    def wanted_in_a_step(self, peer: str) -> bool:
        service = self._service()
        return service is not None and service.core.step is not None and is_wanted(self, peer)

    stand_in.NEEDED_S = 1.0
    stand_in.StandIn._is_wanted = wanted_in_a_step


def spares_one_pipeline() -> None:
    """A reliable peer whose planner makes the second of two pipelines backups after two steps, and then
    rests.
    """
    from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
    from hetpeer.peer.planning.replan import Seating
    from hetpeer.peer.reliable import plan_proposer

    async def spare(_self, service, core):
        seating = Seating.of(core.members)
        if core.done < 2 or core.history.backups or seating.whole != {0, 1}:
            return
        backups = frozenset(peer for peer, (cluster, _) in seating.seats.items() if cluster == 1)
        service.arrange(Arrangement(seating.layouts, seating.seats, backups=backups))

    plan_proposer.LOOK_S, plan_proposer.PlanProposer._look = 0.5, spare


def divides_anew() -> None:
    """A reliable peer whose planner lets the first two of three clusters change a volunteer after six
    batches.
    """
    from hetpeer.bootstrap.grouped.formation import Formation
    from hetpeer.bootstrap.grouped.recut import Recut
    from hetpeer.peer.reliable import plan_proposer
    from hetpeer.peer.reliable.cluster_proposer import ClusterProposer

    begun = []

    async def change(_self, service, core):
        standing = core.standing
        if begun or core.done < 6 or len(standing) < 3:
            return
        begun.append(True)
        retiring = sorted(standing)[:2]
        (a, first), (b, last) = sorted(standing[retiring[0]].items(), key=lambda one: one[1])
        (c, _), (d, _) = sorted(standing[retiring[1]].items(), key=lambda one: one[1])
        clusters = [[(a, first), (d, last)], [(c, first), (b, last)]]
        service.recut(Recut(retiring=frozenset(retiring), formation=Formation(clusters=clusters)))

    plan_proposer.LOOK_S, ClusterProposer.look = 0.5, change
