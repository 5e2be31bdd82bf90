"""The interface of a placement policy: which open places serve the run best for a newcomer. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from hetpeer.averaging.messages import Place
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.stages.planning.swarms.plan_inputs import StepDemand


class PlacementPolicy(ABC):
    """Ranks of places. It has no state. Registered in placement_policies.py (docs/extending.md).

    The volunteer chooses: first a place whose blocks nobody holds, then by rank, then by its own criteria
    (averaging/member/position.py). So a policy cannot keep a run from going on, nor change what is computed.
    """

    describe: ClassVar[str]

    @abstractmethod
    def ranks(
        self,
        places: Sequence[Place],
        newcomer: VolunteerState,
        others: Sequence[VolunteerState],
        demand: StepDemand,
    ) -> Sequence[int]:
        """A rank for each of `places`, open and taken ones: 0 for the best, from 0.

        `others` have places, in the order of their ids; they are not slow, and no backups. `demand` is the
        work of a step. Figures of volunteers are their claims, and 0 where nothing was reported. It is called
        for each newcomer in the coordinator's loop: at most a few milliseconds for 64 volunteers.
        """


class FewestHolders(PlacementPolicy):
    """All places are alike: volunteers go where the fewest others are."""

    describe = "where the fewest others are"

    def ranks(
        self,
        places: Sequence[Place],
        newcomer: VolunteerState,  # noqa: ARG002 - places are alike
        others: Sequence[VolunteerState],  # noqa: ARG002
        demand: StepDemand,  # noqa: ARG002
    ) -> Sequence[int]:
        return [0] * len(places)
