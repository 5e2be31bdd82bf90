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
    from hetpeer.peer.simulate.scenario import read_scenario
    from hetpeer.peer.simulate.scenario_run import play

    outcome = play(read_scenario(scenario))
    typer.echo(json.dumps(outcome.document()) if as_json else "\n".join(_lines(outcome)))


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
    yield f"{'churn':<10}{departures}, {counted(outcome.rollbacks, 'roll-back')}"
