"""`hetpeer demo`: a whole run on this machine, with volunteers killed on the way, and a check of the
result.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hetpeer.peer.cli.options import plain, run_loop
from hetpeer.peer.process.console import is_quiet


def demo(
    *,
    peers: Annotated[int, typer.Option(help="Volunteers, each in its own process.")] = 4,
    steps: Annotated[int, typer.Option(help="Updates of the parameters.")] = 60,
    kill: Annotated[int, typer.Option(help="Volunteers to kill on the way (kill -9).")] = 1,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Text file or folder; repeatable (default: the source text of Python's library).",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="New or empty folder, or the folder of an earlier demo, which is replaced."
        ),
    ] = Path("demo-run"),
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the parameters, the order of the data, and who is killed.")
    ] = 0,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODULE.PY:FUNCTION", help="Function that returns the model (default: a small GPT)."
        ),
    ] = "",
    trace: Annotated[
        bool, typer.Option("--trace", help="Record what is done when; `hetpeer trace DIR` shows it.")
    ] = False,
) -> None:
    """Train a small model with a swarm on this machine.

    Volunteers are killed on the way, and the result is checked.
    """
    from hetpeer.dht.base.runtime import SystemClock
    from hetpeer.peer.demo import demo_settings as preparing
    from hetpeer.peer.demo.demo_view import opened

    settings = preparing.DemoSettings(
        out=out.resolve(),
        peers=peers,
        steps=steps,
        kill=kill,
        data=tuple(data or ()),
        seed=seed,
        model=model,
        trace=trace,
    )
    with preparing.claimed(settings):
        with opened(plain=plain(sys.stderr), quiet=is_quiet()) as view:
            view.say(f"making a run of {steps} steps in {out}")
            run = preparing.make_run(settings, view.say)

            from hetpeer.peer.demo.demo_report import report
            from hetpeer.peer.demo.demo_run import train

            trained = run_loop(train(settings, run, view, SystemClock()))
            summary = report(settings, run, trained, view)
        print("\n".join(summary.lines(out)))
    if not summary.ok:
        raise typer.Exit(1)
