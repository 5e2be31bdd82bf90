"""The commands that README and the guides show, given for real: one small swarm for all of them, on this
machine.

Where they listen, whose ids and files they name, is this test's own; so is their order, as one shows how to
end what another needs. What one machine cannot do within seconds is in `NOT_HERE`, with the reason; it is
parsed all the same (tests/peer/test_doc_commands.py, which also does all that the author's guide says).
"""

from __future__ import annotations

import asyncio
import re
import signal
from functools import cache
from pathlib import Path

import pytest

from hetpeer.dht.identity.peer_identity import Identity
from tests.peer.test_doc_commands import PAGES, UsageError, parsed, shown, words
from tests.swarm.child import BUSY_S, Child, until
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

ELSEWHERE = ("docs/authors.md", "docs/finetune.md")
"""Pages whose commands other tests give, in their order."""
NOT_HERE = {
    "bootstrap my_run --lan": "multicast is not everywhere; tests/swarm/test_lan.py",
    "join --lan": "likewise",
    "bootstrap my_run --peers hetpeer://": "a run of three reliable peers; tests/swarm/test_reliable.py",
    "service ": "it would change the systemd of whoever runs the tests; tests/peer/test_service_command.py",
    "dashboard --home": "these daemons serve none (HETPEER_DASHBOARD=off); tests/peer/test_link_to_page.py",
    "init digits": "it takes the extra `examples` and half a minute; tests/bootstrap/test_digits.py",
    "init my_run --model hf:Qwen": "a model of the hub; tests/peer/test_doc_commands.py has one on the disk",
    "inspect hetpeer/examples/gpt.py:build_7b": "it takes half a minute; benchmarks/planning.py",
}
"""How a command begins → why it is not given here."""
LONG = 2 * BUSY_S
ENDLESS = {"status --watch", "plan --watch", "logs -f", "logs --home my_run -f"}
"""They go on until Ctrl-C."""
SAYS = {
    "status": "progress",
    "plan": "step",
    "logs": "in the run",
    "logs --home my_run -f": "leading",
    "doctor": "settings",
    "id": "Qm",
    "invite": "hetpeer://",
    "inspect": "block",
    "audit": "verdict       exactly once",
    "pause": "paused",
    "join": "this was a trial",
    "generate": "def ",
}
"""The first word of a command → what must be in what it prints."""


@cache
def commands() -> dict[str, list[str]]:
    """Each once, as one text and as its words; without those that only name a command, and mean it with
    what it takes.
    """
    found = {}
    for command in (words(text) for page in PAGES if page not in ELSEWHERE for text in shown(page)):
        try:
            parsed(command)
        except UsageError:
            continue
        found[" ".join(command)] = command
    return found


@pytest.mark.proof
def test_what_is_not_given_is_shown_somewhere() -> None:
    for beginning in NOT_HERE:
        assert any(command.startswith(beginning) for command in commands()), beginning


class Reader:
    """Somebody who does what the pages say, in `swarm`."""

    def __init__(self, swarm: Swarm, folder: Path) -> None:
        self._swarm = swarm
        self._folder = folder
        self._words = commands()
        self.left = [command for command in self._words if not command.startswith(tuple(NOT_HERE))]
        """What has not been done yet."""
        self.made: Path | None = None
        """Where `init` makes a run."""
        self.invite = self.address = self.rendezvous = ""
        self._few = asyncio.Semaphore(4)
        """So many commands at a time: each is a process that has to begin."""
        self.home = folder / "one"
        """Of whoever gives a command about his own volunteer."""
        (folder / "corpus").mkdir()
        (folder / "corpus" / "text.txt").write_text("".join(f"{n} is {n * n}.\n" for n in range(4000)))
        self._strangers = iter(Identity.create(folder / f"stranger-{n}.key").peer_id for n in range(9))

    def take(self, *patterns: str) -> list[str]:
        """Those that are left and match one of `patterns`, in their order; they are left no more."""
        found = [c for pattern in patterns for c in self.left if re.fullmatch(pattern, c)]
        assert found, patterns
        self.left = [command for command in self.left if command not in found]
        return list(dict.fromkeys(found))

    def here(self, word: str, before: str = "") -> str:
        """What stands for a word of a page, which comes after another."""
        if word.startswith("hetpeer://") or word in ("INVITE", "LINK"):
            return self.invite
        if word.startswith("/ip4/"):
            return self.rendezvous if "QmRen" in word else self.address
        if before == "--reliable":
            own = self._swarm.run.manifest.coordinators[0]
            return own if word in ("…", "QmeATs…") else next(self._strangers)
        files = {"weights.safetensors", "graph.svg", "FILE"}
        run = self.made or self._swarm.run.path
        places = {"my_run": run, "DIR": run, "OUT": self._folder / "OUT", "corpus/": self._folder / "corpus"}
        if word in files:
            return str(self._folder / word)
        return str(places.get(word, "hetpeer/examples/gpt.py:build" if word == "…" else word))

    def start(self, command: str, *more: str, home: Path | None = None) -> Child:
        shown = self._words.get(command, command.split())
        arguments = [self.here(word, before) for before, word in zip(["", *shown], shown, strict=False)]
        return self._swarm.start("said", *arguments, *more, home=home or self.home)

    async def give(self, command: str, *more: str, home: Path | None = None) -> Child:
        """It ends well, and has said what it is for."""
        async with self._few:
            return await self._given(command, *more, home=home)

    async def _given(self, command: str, *more: str, home: Path | None) -> Child:
        child = self.start(command, *more, home=home)
        if command in ENDLESS:
            await until(lambda: child.printed or child.status is not None, f"{command} shows something", LONG)
            child.signal(signal.SIGINT)
        assert await child.ended(LONG) in ((0, 130) if command in ENDLESS else (0,)), (
            f"{command}: {child.said}"
        )
        for_it = SAYS.get(command, SAYS.get(command.split(maxsplit=1)[0], ""))
        assert for_it in child.printed + child.said, f"{command}: {child.printed}"
        return child

    async def serve(self, command: str, home: Path) -> tuple[Child, list[str]]:
        """A bootstrap node, and the lines that it prints."""
        child = self.start(command, "--host", "127.0.0.1", "--port", "0", home=home)
        await until(lambda: child.printed or child.status is not None, f"{command} serves", LONG)
        assert child.status is None, child.said
        return child, child.printed.splitlines()


@pytest.mark.proof
async def test_every_command_that_is_shown_does_what_it_says(swarm: Swarm, tmp_path: Path) -> None:
    training = swarm.run.manifest.training.model_copy(update={"steps": 100_000})
    swarm.run = resign(swarm.run, training=training)
    reader = Reader(swarm, tmp_path)

    (command,) = reader.take("bootstrap")
    _, lines = await reader.serve(command, tmp_path / "rendezvous")
    reader.rendezvous = lines[0].split()[-1]
    served = reader.take("bootstrap my_run --peers /ip4/.*", "bootstrap DIR.*", "bootstrap my_run.*")
    for other in served[1:]:  # the same run from the same folder, one after the other
        child, _ = await reader.serve(other, swarm.run.path)
        child.signal(signal.SIGINT)
        await child.ended()
    _, lines = await reader.serve(served[0], swarm.run.path)
    reader.address, reader.invite = lines[0].split()[-1], lines[1].split()[-1]

    joins = reader.take("join --bootstrap .*", "join hetpeer://.* --name .*", "join (hetpeer://.*|LINK)")
    one, other = (
        reader.start(command, "--host", "127.0.0.1", home=tmp_path / name)
        for command, name in zip(joins[:2], ("one", "other"), strict=True)
    )
    assert {reader.here(command.split()[1]) for command in joins[1:]} == {reader.invite}, "one joined by it"
    for volunteer in (one, other):
        await volunteer.says("you are contributing", LONG)
    await swarm.stored(5, LONG)
    (command,) = reader.take("plan --watch")  # it waits until all links are measured, as others do not
    await reader.give(command)

    asking = reader.take("status.*", "plan.*", "logs.*", "doctor.*", "id( --.*)?", "invite .*", "inspect .*")
    await asyncio.gather(*map(reader.give, asking))
    (command,) = reader.take("join --dry-run .*")
    await reader.give(command, "--host", "127.0.0.1", home=tmp_path / "third")
    for command in reader.take("config.*", "pause.*"):
        await reader.give(command)
    await one.says("paused (user)", LONG)
    (command,) = reader.take("resume")
    await reader.give(command)
    await one.says("resumed", LONG)
    for command in reader.take("finish"):
        await reader.give(command)
    assert await one.ended(LONG) == 0
    for command in reader.take("id .*"):
        await reader.give(command)
    (command,) = reader.take("join")
    again = reader.start(command, "--host", "127.0.0.1")
    await again.says("in the run", LONG)
    for command in reader.take("stop"):
        await reader.give(command)
    assert await again.ended(LONG) == 0
    (command,) = reader.take("join --for .*")
    again = reader.start(command, "--host", "127.0.0.1")
    await again.says("in the run", LONG)
    for leaving in (again, other):
        leaving.signal(signal.SIGINT)
        assert await leaving.ended(LONG) == 0
    for command in reader.take("stop --home .*"):
        await reader.give(command)

    results = reader.take("audit.*", "export my_run weights.*", "generate.*", "amend.*")
    await asyncio.gather(*map(reader.give, results))
    for number, command in enumerate(reader.take("init my_run .*")):
        reader.made = tmp_path / f"made-{number}"
        await reader.give(command)
        assert (reader.made / "manifest.hetpeer").exists()
        if "--lora" in command:
            (adapters,) = reader.take("export my_run OUT --format adapter")
            await reader.give(adapters)
    assert reader.left == []
    assert (tmp_path / "weights.safetensors").stat().st_size > 0
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")
