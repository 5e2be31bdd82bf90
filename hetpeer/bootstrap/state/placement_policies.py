"""The registry of placement policies: a new policy is one module and one line here (docs/extending.md)."""

from __future__ import annotations

from hetpeer.averaging.messages import Place
from hetpeer.bootstrap.state.membership import Membership, VolunteerState
from hetpeer.bootstrap.state.placement_policy import FewestHolders, PlacementPolicy
from hetpeer.bootstrap.state.step_time_placement import StepTime
from hetpeer.stages.planning.swarms.plan_inputs import StepDemand

PLACEMENT_POLICIES: dict[str, PlacementPolicy] = {
    "step-time": StepTime(),
    "holders": FewestHolders(),
}
"""Name for `hetpeer bootstrap --placement` → policy."""
DEFAULT = "step-time"


def ranked(
    members: Membership, newcomer: VolunteerState, asks: StepDemand | None, policy: str = DEFAULT
) -> tuple[Place, ...]:
    """The places of `members` for `newcomer`, ranked by that policy; all have rank 0 without `asks`."""
    places = members.places(newcomer)
    if asks is None:
        return places
    others = [
        v
        for peer, v in sorted(members.volunteers.items())
        if v.place and not v.slow and v is not newcomer and peer not in members.backups
    ]
    ranks = PLACEMENT_POLICIES[policy].ranks(places, newcomer, others, asks)
    return tuple(place.model_copy(update={"rank": n}) for place, n in zip(places, ranks, strict=True))
