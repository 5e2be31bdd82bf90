"""`hetpeer simulate`: train in virtual time with devices that are described in a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpeer.peer.cli.options import JsonOption
from hetpeer.peer.limits.amounts import block_range, counted

if TYPE_CHECKING:
    from hetpeer.peer.simulate.reliability_gain import ReliabilityGain
    from hetpeer.peer.simulate.scenario_run import ScenarioOutcome


def simulate(
    scenario: Annotated[
        Path,
        typer.Argument(
            metavar="SCENARIO.toml", help="File with devices, a model and events (docs/planning.md)."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Simulate a run in virtual time.

    The real planner, coordinator and volunteers run on the devices and links of a file.
    """
    from hetpeer.peer.simulate.reliability_gain import play_weighed
    from hetpeer.peer.simulate.scenario import read_scenario

    outcome, gain = play_weighed(read_scenario(scenario))
    document = outcome.document() | ({} if gain is None else {"reliability": gain.document()})
    lines = [*_lines(outcome), *([] if gain is None else _gained(gain))]
    typer.echo(json.dumps(document) if as_json else "\n".join(lines))


def _lines(outcome: ScenarioOutcome) -> Iterator[str]:
    """Plain text, one fact a line."""
    document = outcome.document()
    for number, stages in enumerate(document["pipelines"]):
        places = " → ".join(f"{stage['device']} {block_range(*stage['blocks'])}" for stage in stages)
        yield f"{'pipeline':<10}{number}: {places}"
    yield f"{'predicted':<10}{document['predicted_s']:.2f} s a step"
    least, most = document["step_s"]["least"], document["step_s"]["most"]
    pace = f"{document['steps_an_hour']:.1f} an hour"
    yield f"{'step':<10}{outcome.median_s:.2f} s ({least:.2f} to {most:.2f}), {pace}"
    yield f"{'goodput':<10}{outcome.goodput:.1%} of what was computed was counted"
    departures = counted(outcome.departures, "departure")
    again = counted(round(outcome.again), "microbatch", "microbatches")
    yield f"{'churn':<10}{departures}, {counted(outcome.rollbacks, 'roll-back')}, {again} done again"


def _gained(gain: ReliabilityGain) -> Iterator[str]:
    """Lines on the departures that the planner expects, and on the savings by its weight on them."""
    expected, weighed, other = gain.expected, gain.weighed, gain.without
    costs = f"{expected.rollbacks:.2g} roll-backs and {expected.leftovers:.2g} leftovers an hour"
    yield f"{'expected':<10}{expected.step_s:.2f} s a step with departures: {costs}"
    if other is None:
        yield f"{'saved':<10}everything: planned for speed alone, the run does not come to its end"
        return
    again = counted(round(other.again), "microbatch", "microbatches")
    pace = f"{other.steps_an_hour:.1f} an hour"
    events = f"{counted(other.departures, 'departure')}, {counted(other.rollbacks, 'roll-back')}"
    yield f"{'unweighed':<10}{pace}; {events}, {again} done again"
    back, less = other.rollbacks - weighed.rollbacks, round(other.again - weighed.again)
    more = weighed.steps_an_hour - other.steps_an_hour
    yield f"{'saved':<10}{back} roll-backs, {less} microbatches done again; {more:+.1f} steps an hour"
