"""`hetpeer plan`: how long a swarm's step ought to take, and what it waits for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from hetpeer.peer.cli.options import BootstrapOption, HomeOption, JsonOption, asked, run_loop

if TYPE_CHECKING:
    from hetpeer.dht.addresses import Address
    from hetpeer.peer.predicting import Prediction

WATCH_S = 5.0


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(plan)


def plan(
    *,
    bootstrap: BootstrapOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on predicting until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Predict a running swarm's step from its measured links and blocks, and say what it waits for."""
    run_loop(_look(asked(bootstrap, home), watch=watch, as_json=as_json))


async def _look(addresses: list[Address], *, watch: bool, as_json: bool) -> None:
    import asyncio

    from hetpeer.dht.errors import LocalError
    from hetpeer.peer.predicting import predict
    from hetpeer.peer.status import observing

    async with observing(addresses) as onlooker:
        while True:
            try:
                found = predict(onlooker.signed, await onlooker.adverts())
                print(json.dumps(found.document()) if as_json else "\n".join(_lines(found)), flush=True)
            except LocalError as error:
                if not watch:
                    raise
                print(error.line(), file=sys.stderr)
            if not watch:
                return
            await asyncio.sleep(WATCH_S)


def _lines(found: Prediction) -> Iterator[str]:
    """Plain text, one fact a line."""
    seconds, measured = found.estimate.seconds, found.measured_s
    yield f"{'run':<10}{found.run}"
    beside = f"  the last one took {measured:.2f} s ({measured / seconds - 1:+.0%})" if measured else ""
    yield f"{'step':<10}{seconds:.2f} s predicted, {found.estimate.between_s:.2f} s of it between two steps{beside}"
    for member in found.members:
        blocks = f"blocks {member.blocks[0]}-{member.blocks[1] - 1}"
        yield f"{'peer':<10}{member.name}  {blocks}  computes {member.computing:.0%}, sends {member.sending:.0%} of the time"
    what, peer = found.estimate.bottleneck
    name = next(member.name for member in found.members if member.peer == peer)
    yield f"{'waits for':<10}{name}, which is {what}"
