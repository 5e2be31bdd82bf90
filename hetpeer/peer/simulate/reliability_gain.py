"""Savings of a plan that weighs departures, beside the plan of the same devices that does not.

Both are played with the same departures: a device leaves at the same times wherever it has a place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.simulate.scenario import Scenario
from hetpeer.peer.simulate.scenario_run import Places, ScenarioOutcome, plan_of, play
from hetpeer.stages.planning.swarms.departure_costs import DepartureCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityGain:
    """A scenario with the plan that weighs departures, and with the one that does not."""

    weighed: ScenarioOutcome
    without: ScenarioOutcome | None
    """None: that run does not come to its end."""
    expected: DepartureCosts
    """Costs of departures that the planner expects of its plan."""

    def document(self) -> dict[str, Any]:
        """The entry `reliability` of `--json`; what is saved is null where the other run does not end."""
        other, weighed = self.without, self.weighed
        return {
            "expected": {
                "step_s": self.expected.step_s,
                "rollbacks_an_hour": self.expected.rollbacks,
                "leftovers_an_hour": self.expected.leftovers,
            },
            "without": None
            if other is None
            else {
                "steps_an_hour": other.steps_an_hour,
                "departures": other.departures,
                "rollbacks": other.rollbacks,
                "again": other.again,
            },
            "saved": None
            if other is None
            else {
                "steps_an_hour": weighed.steps_an_hour - other.steps_an_hour,
                "rollbacks": other.rollbacks - weighed.rollbacks,
                "again": other.again - weighed.again,
            },
        }


def play_weighed(scenario: Scenario) -> tuple[ScenarioOutcome, ReliabilityGain | None]:
    """Play a scenario, and again without the weight of departures if the devices say how often they leave.

    Raises `LocalError` as `play` does.
    """
    plan = plan_of(scenario)
    outcome = play(scenario, Places.of(plan))
    if plan.departures is None or scenario.equal_stages is not None:
        return outcome, None
    named = scenario.devices
    unaware = replace(scenario, devices=replace(named, devices=replace(named.devices, departures=None)))
    try:
        without = play(scenario, Places.of(plan_of(unaware)))
    except LocalError:
        without = None
    return outcome, ReliabilityGain(weighed=outcome, without=without, expected=plan.departures)
