"""How long does a new user wait? A clone of this repository, set up as README says, a run of it, and a
volunteer that joins.

The set-up (`git clone` of what is committed here, `make setup`) is timed apart: most of it is torch on its
way. Then, in each round, a run is made (`hetpeer init`) and served (`hetpeer bootstrap`), and somebody whose
home folder is empty joins by the address that this prints: seconds from the command to the line that says
"you are contributing", and what is said on the way. It has all blocks, so nobody else is waited for.

    python -m benchmarks.firstjoin --rounds 5
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import report
from hetpeer.dht.base.runtime import dying_with_us

ROOT = Path(__file__).parents[1]
CONTRIBUTING = "you are contributing"
STEPS = 1000
WITHIN_S, END_S = 300.0, 15.0
GOAL_S = 60.0
SAID = ((r"token=\S+", "token=…"), (r"Qm[1-9A-HJ-NP-Za-km-z]{44}", "Qm…"), (r"\b\d+\.\d+\.\d+\.\d+\b", "IP"))
"""Parts of messages that only this machine prints."""
FOREIGN = ("PYTHON", "VIRTUAL_ENV", "HETPEER_", "XDG_", "MAKE")
"""Beginnings of names in the environment that a new user has none of."""

Said = list[tuple[float, str]]
"""(seconds from the command on, line)."""


class Command:
    """A command of a new user, in the clone."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.said: Said = []
        self._process = process
        self._folder = folder
        self._began = time.monotonic()

    async def until(self, words: str) -> tuple[float, str]:
        """Seconds until a line with `words`, and that line.

        Raises SystemExit where it ends, or takes too long, without it.
        """
        assert self._process.stdout is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN_S):
                while raw := await self._process.stdout.readline():
                    line = raw.decode(errors="replace").strip()
                    passed = time.monotonic() - self._began
                    self.said.append((round(passed, 2), self._anonymous(line)))
                    if words in line:
                        return passed, line
        raise SystemExit(f"it never said {words!r}, but: {self.said[-3:]}")

    async def ended(self) -> float:
        """Seconds until its good end."""
        output, _ = await asyncio.wait_for(self._process.communicate(), WITHIN_S)
        if self._process.returncode:
            raise SystemExit(f"it failed: {output.decode(errors='replace')[-1000:]}")
        return time.monotonic() - self._began

    def _anonymous(self, line: str) -> str:
        for pattern, instead in SAID:
            line = re.sub(pattern, instead, line)
        return line.replace(str(self._folder), "…")[:200]


@asynccontextmanager
async def command(folder: Path, home: Path, *arguments: str) -> AsyncIterator[Command]:
    """`hetpeer *arguments` in the clone, of somebody who lives in `home`.

    It is ended as by Ctrl-C, if it has not.
    """
    process = await asyncio.create_subprocess_exec(
        folder / "hetpeer" / ".venv" / "bin" / "hetpeer",
        *arguments,
        cwd=folder / "hetpeer",
        env={**environment(), "HOME": str(home)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=dying_with_us(),
        start_new_session=True,
    )
    try:
        yield Command(process, folder)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.communicate(), END_S)  # nobody waits for a pipe that is full
        if process.returncode is None:
            process.kill()
            await process.communicate()


def environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}


def set_up(folder: Path) -> dict[str, float]:
    """Seconds of the clone, into `folder`/hetpeer, and of its set-up."""
    found = {}
    for name, where, words in (
        ("clone_s", folder, ("git", "clone", "-q", str(ROOT), "hetpeer")),
        ("setup_s", folder / "hetpeer", ("make", "setup")),
    ):
        began = time.monotonic()
        done = subprocess.run(
            words, cwd=where, env=environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stderr[-1000:]}")
        found[name] = round(time.monotonic() - began, 1)
    return found


async def one_round(folder: Path, number: int) -> dict[str, Any]:
    author, newcomer = (folder / f"{who}-{number}" for who in ("author", "newcomer"))
    author.mkdir()
    newcomer.mkdir()
    run = str(author / "my_run")
    model = (
        "--model",
        "hetpeer/examples/gpt.py:build",
        "--data",
        "docs",
        "--steps",
        str(STEPS),
        "--stages",
        "1",
    )
    async with command(folder, author, "init", run, *model) as made:
        init_s = await made.ended()
    async with command(folder, author, "bootstrap", run, "--port", "0") as serving:
        serve_s, line = await serving.until("hetpeer join --bootstrap")
        async with command(folder, newcomer, "join", "--bootstrap", line.split()[-1]) as joining:
            join_s, _ = await joining.until(CONTRIBUTING)
            return {
                "init_s": round(init_s, 2),
                "serve_s": round(serve_s, 2),
                "join_s": round(join_s, 2),
                "said": joining.said,
            }


async def rounds(folder: Path, count: int) -> list[dict[str, Any]]:
    found = []
    for number in range(count):
        found.append(await one_round(folder, number))
        print(
            {name: found[-1][name] for name in ("init_s", "serve_s", "join_s")}, file=sys.stderr, flush=True
        )
    return found


def measure(count: int, folder: Path) -> dict[str, Any]:
    once = set_up(folder)
    found = asyncio.run(rounds(folder, count))
    middle = {name: _middle([one[name] for one in found]) for name in ("init_s", "serve_s", "join_s")}
    return {
        **once,
        "middle": middle,
        "longest_join_s": max(one["join_s"] for one in found),
        "goal_s": GOAL_S,
        "rounds": found,
        "met": middle["join_s"] <= GOAL_S,
    }


def _middle(values: Sequence[float]) -> float:
    return round(statistics.median(values), 2)


def show(figures: dict[str, Any]) -> None:
    middle = figures["middle"]
    print(f"clone {figures['clone_s']} s, set-up {figures['setup_s']} s")
    print(f"init {middle['init_s']} s, until bootstrap serves {middle['serve_s']} s (middle)")
    print(f"join: contributing after {middle['join_s']} s (middle), {figures['longest_join_s']} s (longest)")
    for seconds, line in figures["rounds"][0]["said"]:
        print(f"  {seconds:6.2f} s  {line}")
    print(f"goal: {figures['goal_s']:g} s: {'met' if figures['met'] else 'MISSED'}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-firstjoin-") as folder:
        figures = measure(options.rounds, Path(folder))
    return report.finish("firstjoin", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
