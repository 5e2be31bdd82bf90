"""How soon is on the dashboard what happens? Real processes on loopback, and the stream that a browser gets.

A run of one stage with two volunteers, either of which can be missed; the page is that of the first one. In
each round: its owner pauses it (from the answer to the command on), a step is committed (from its record in
the log on), another volunteer comes (from the moment on that it is in the run and starts its worker) and
leaves (from its end on; 0 where the page is sooner). Seconds until the first view that says so has arrived;
the middle of the rounds.

    python -m benchmarks.pageupdates --rounds 5
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from benchmarks import report
from benchmarks.swarm import WITHOUT_END, Model, Swarm, make_run, running
from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.control.control_client import ask
from hetpeer.peer.control.control_messages import ControlRequest, DaemonStatus

MODEL = Model()
"""Size of the model: a step takes about a second."""
VOLUNTEERS, STAGES = 2, 1
WATCHED = 1
POLL_S = 0.02
WITHIN_S = 120.0
GOAL_S = 2.0
ARRIVING = "starting"
"""State of a volunteer that cannot be anybody's news yet."""
AT_WORK = ("training", "waiting")

View = dict[str, Any]


class Page:
    """Messages that a page is sent, and when."""

    def __init__(self) -> None:
        self._views: list[tuple[float, View]] = []
        self._news = asyncio.Event()

    async def listen(self, link: str) -> None:
        """Never returns."""
        where = urlsplit(link)
        token = parse_qs(where.fragment)["token"][0]
        reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 24)
        writer.write(f"GET /api/v1/events?token={token} HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode())
        try:
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    self._views.append((time.monotonic(), json.loads(line[6:])))
                    self._news.set()
        finally:
            writer.close()
        raise SystemExit("the page's stream has ended")

    async def shows(self, happened: float, what: Callable[[View], bool]) -> float:
        """Seconds from `happened` until a view came that says `what`; 0 where one came before."""
        async with asyncio.timeout(WITHIN_S):
            place = max(len(self._views) - 1, 0)
            while True:
                for came, view in self._views[place:]:
                    if what(view):
                        return max(came - happened, 0.0)
                place = len(self._views)
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def opened(link: str) -> AsyncIterator[Page]:
    page = Page()
    listening = asyncio.create_task(page.listen(link))
    try:
        yield page
    finally:
        listening.cancel()


async def standing(swarm: Swarm, number: int, do: str = "status") -> DaemonStatus:
    """Answer of volunteer `number`. Raises `LocalError` HP-CTL-*."""
    return await asyncio.to_thread(ask, swarm.home(number), ControlRequest(do=do))


async def when(swarm: Swarm, number: int, what: Callable[[DaemonStatus], bool]) -> float:
    """The moment at which volunteer `number` says so; one that has just started does not answer yet."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            with suppress(LocalError):
                if what(await standing(swarm, number)):
                    return time.monotonic()
            swarm.check()
            await asyncio.sleep(POLL_S)


def is_there(name: str) -> Callable[[View], bool]:
    return lambda view: any(row["name"] == name for row in (view["status"] or {"peers": ()})["peers"])


async def pausing(swarm: Swarm, page: Page) -> float:
    await standing(swarm, WATCHED, "pause")
    found = await page.shows(time.monotonic(), lambda view: view["you"]["state"] == "paused")
    await standing(swarm, WATCHED, "resume")
    await page.shows(time.monotonic(), lambda view: view["you"]["state"] in AT_WORK)
    return found


async def committing(swarm: Swarm, page: Page) -> float:
    """From the last look at the log that did not find it yet: no later than it was committed."""
    looking = time.monotonic()
    swarm.feed.poll()
    step = swarm.feed.history.version + 1
    async with asyncio.timeout(WITHIN_S):
        while swarm.feed.history.version < step:
            swarm.check()
            happened, looking = looking, time.monotonic()
            await asyncio.sleep(POLL_S)
            swarm.feed.poll()
    return await page.shows(happened, lambda view: view["status"]["progress"]["step"] >= step)


async def coming_and_going(swarm: Swarm, page: Page, number: int) -> tuple[float, float]:
    await swarm.add(number)
    shows = is_there(f"v{number}")
    there = await when(swarm, number, lambda found: found.state != ARRIVING)
    came = await page.shows(there, shows)
    swarm.at_liberty.add(number)
    volunteer = swarm.volunteers[number]
    os.kill(volunteer.pid, signal.SIGINT)
    await volunteer.finished(WITHIN_S)
    return came, await page.shows(time.monotonic(), lambda view: not shows(view))


async def measure(options: Any, folder: Path) -> dict[str, Any]:
    run = make_run(folder, MODEL, STAGES, WITHOUT_END, options.seed)
    rounds = []
    async with running(run, folder, VOLUNTEERS, "--dashboard", "127.0.0.1:0") as swarm:
        await swarm.until(2, WITHIN_S)
        here = await standing(swarm, WATCHED)
        if here.dashboard is None:
            raise SystemExit("it serves no page")
        async with opened(here.dashboard) as page:
            await page.shows(0.0, lambda view: view["status"] is not None)
            for number in range(options.rounds):
                found = {"pause_s": await pausing(swarm, page), "commit_s": await committing(swarm, page)}
                found["came_s"], found["went_s"] = await coming_and_going(
                    swarm, page, VOLUNTEERS + 1 + number
                )
                rounds.append(found)
                print(found, file=sys.stderr, flush=True)
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    return {
        "middle": middle,
        "longest": {name: max(one[name] for one in rounds) for name in rounds[0]},
        "goal_s": GOAL_S,
        "rounds": rounds,
        "met": all(seconds <= GOAL_S for seconds in middle.values()),
    }


def show(figures: dict[str, Any]) -> None:
    for name, seconds in figures["middle"].items():
        print(f"{name.removesuffix('_s'):8}{seconds:5.2f} s, at most {figures['longest'][name]:.2f} s")
    print(f"goal: {figures['goal_s']:g} s in the middle: {'met' if figures['met'] else 'MISSED'}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-pageupdates-") as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    return report.finish("pageupdates", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
