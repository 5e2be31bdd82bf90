"""The registry of placement policies: a new policy is one module and one line here (docs/extending.md)."""

from __future__ import annotations

from collections import Counter

from hetpeer.averaging.messages import Place
from hetpeer.bootstrap.state.membership import Membership
from hetpeer.bootstrap.state.placement_policy import FewestHolders, PlacementPolicy
from hetpeer.bootstrap.state.step_time_placement import StepTime, makes_longer
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.stages.planning.swarms.plan_inputs import StepDemand

PLACEMENT_POLICIES: dict[str, PlacementPolicy] = {
    "step-time": StepTime(),
    "holders": FewestHolders(),
}
"""Name for `hetpeer bootstrap --placement` → policy."""
DEFAULT = "step-time"
COPIES = 2
"""Least holders and backups of each block beside a newcomer that becomes a backup."""


def ranked(
    members: Membership, newcomer: VolunteerState, asks: StepDemand | None, policy: str = DEFAULT
) -> tuple[Place, ...]:
    """The places of `members` for `newcomer`, ranked by that policy; all have rank 0 without `asks`."""
    places = members.places(newcomer)
    if asks is None:
        return places
    others = _working(members, newcomer)
    ranks = PLACEMENT_POLICIES[policy].ranks(places, newcomer, others, asks)
    return tuple(place.model_copy(update={"rank": n}) for place, n in zip(places, ranks, strict=True))


def is_spared(
    members: Membership,
    newcomer: VolunteerState,
    asks: StepDemand | None,
    measured_s: float | None,
    policy: str = DEFAULT,
) -> bool:
    """Whether a newcomer, which has just got a place, is to be a backup there.

    It is if steps would be longer with it at each place that fits it, and others hold each block twice at
    least, backups included. Only the policy "step-time" knows how long steps are. `measured_s`: seconds of
    the last step; None: none was measured.
    """
    if asks is None or measured_s is None or policy != DEFAULT:
        return False
    others = [v for v in members.volunteers.values() if v.place and not v.slow and v is not newcomer]
    held = Counter(block for v in others for block in range(*(v.place or (0, 0))))
    if min(held[block] for block in range(members.blocks)) < COPIES:
        return False
    own = newcomer.place
    open_ = [p for p in members.places() if p.open or (p.begin, p.end) == own]
    fitting = [place for place in open_ if newcomer.has_room(place)]
    return makes_longer(fitting, newcomer, _working(members, newcomer), asks, measured_s)


def _working(members: Membership, newcomer: VolunteerState) -> list[VolunteerState]:
    """Volunteers with places that are not slow and no backups, without `newcomer`, by their ids."""
    return [
        v
        for peer, v in sorted(members.volunteers.items())
        if v.place and not v.slow and v is not newcomer and peer not in members.backups
    ]
