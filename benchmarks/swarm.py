"""A real swarm on this machine for benchmarks to look at: one bootstrap node and volunteers, as child
processes.

Every process dies with the benchmark (peer/process/hetpeer_children.py). A swarm can be frozen (SIGSTOP) and
thawed, so that others can be measured beside it on the same cores; frozen for longer than a lease it would
fall apart.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.manifest import sign
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import AveragingSettings, LinkSettings, TrainingSettings, TrustSettings
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.peer.demo.demo_run import LogFeed
from hetpeer.peer.process.hetpeer_children import COMMAND, Child, end_all
from tests.wanlab.lab import Lab

START_S = 120.0
LAST_LINES = 40
POLL_S = 0.005
ENDLESS, NEVER = 100_000, 1_000_000
"""Steps of a run that is stopped, and between evaluations or checkpoints that are not to be measured."""
WITHOUT_END = TrainingSettings(
    steps=ENDLESS,
    batch_size=32,
    microbatch_size=4,
    eval_every=NEVER,
    eval_microbatches=1,
    checkpoint_every=NEVER,
)
"""Nothing but steps, as long as somebody looks on."""
ENTRIES = {COMMAND[-1], "benchmarks.observed", "benchmarks.loop_lag", "benchmarks.slowed"}
Step = tuple[int, int, int]
"""Term, view and number."""
KINDS = ("bootstrap", "bootstrap p2pd", "volunteer", "worker", "volunteer p2pd")


def endless(microbatches: int, checkpoint_every: int) -> TrainingSettings:
    """Settings of a run that is stopped: `microbatches` of two samples in a step, one in each slot."""
    return TrainingSettings(
        steps=ENDLESS,
        batch_size=2 * microbatches,
        microbatch_size=2,
        slot_size=2,
        eval_every=50,
        eval_microbatches=2,
        checkpoint_every=checkpoint_every,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A GPT of examples/gpt.py for bytes of text."""

    width: int = 256
    layers: int = 4
    heads: int = 4
    sequence_length: int = 128

    def write(self, path: Path) -> str:
        """A file with the author's function; returns the reference to it."""
        sizes = f"{self.width}, {self.layers}, {self.heads}, {self.sequence_length}, 256"
        path.write_text(
            "from hetpeer.examples.gpt import GPT\n\n\n"
            "def build():\n"
            f"    return GPT({sizes})\n"
        )  # fmt: skip
        return f"{path}:build"


def make_run(
    folder: Path,
    model: Model,
    stages: int,
    training: TrainingSettings,
    seed: int,
    links: LinkSettings | None = None,
    averaging: AveragingSettings | None = None,
    trust: TrustSettings | None = None,
    bottleneck: int | None = None,
) -> RunDirectory:
    """A run directory under `folder`, on the text of Python's library."""
    return create_run(
        folder / "run",
        model=model.write(folder / "model.py"),
        name="benchmark",
        seed=seed,
        sequence_length=model.sequence_length,
        stages=[stages],
        training=training,
        links=links or LinkSettings(),
        averaging=averaging,
        trust=trust,
        bottleneck=bottleneck,
    )


def recut(run: RunDirectory, layout: Sequence[tuple[int, int]]) -> RunDirectory:
    """The same run with another cut of its model, signed by its owner again."""
    key = Ed25519PrivateKey.from_private_bytes((run.path / "owner.key").read_bytes())
    changed = run.manifest.model_copy(update={"layouts": (tuple(layout),)})
    (run.path / "manifest.hetpeer").write_bytes(sign(changed, key))
    return RunDirectory.open(run.path)


@dataclass(frozen=True, slots=True)
class Site:
    """Where the processes of a swarm are: on this machine's loopback, or at the nodes of a laboratory."""

    command: Sequence[str] = COMMAND
    """Starts hetpeer."""
    lab: Lab | None = None
    keep_places: bool = True
    """Who has which blocks is part of what is compared: nobody is given others meanwhile."""
    cores: Mapping[int, float] = field(default_factory=dict)
    """Node → the part of a processor that its compute worker has (root); others have a whole one."""

    def at(self, node: int) -> Sequence[str]:
        """Command that starts hetpeer at `node`."""
        command = self.command
        if node in self.cores:
            command = (sys.executable, "-P", "-m", "benchmarks.slowed", f"{self.cores[node]:.4f}")
        return self.lab.at(node, command) if self.lab else command

    def listening(self, node: int) -> Sequence[str]:
        """Options that say where it listens."""
        return ("--host", self.lab.address(node) if self.lab else "127.0.0.1", "--port", "0")


class Swarm:
    """The processes of one run.

    Volunteers are numbered from 1, as the nodes they are at; the bootstrap is at node 0.
    """

    def __init__(
        self,
        run: RunDirectory,
        folder: Path,
        bootstrap: Child,
        address: str,
        site: Site,
        options: Sequence[str] = (),
    ) -> None:
        self.run = run
        self.feed = LogFeed(run.log_path, SystemClock())
        self.volunteers: dict[int, Child] = {}
        self.at_liberty: set[int] = set()
        """Volunteers that may end as they like."""
        self.bootstrap = bootstrap
        self.address = address
        self._folder = folder
        self._site = site
        self._options = options
        self._frozen: list[psutil.Process] = []

    async def add(self, number: int, *options: str) -> None:
        """Start volunteer `number`; `options` are those of `join`."""
        arguments = ("join", "--bootstrap", self.address, "--name", f"v{number}", *options)
        self.volunteers[number] = await Child.start(
            f"volunteer {number}",
            (*arguments, *self._site.listening(number)),
            home=self.home(number),
            log=self._folder / f"volunteer-{number}.log",
            command=self._site.at(number),
        )

    @asynccontextmanager
    async def asking(self, *arguments: str) -> AsyncIterator[Child]:
        """A command that looks at the swarm, run beside the bootstrap node; it is ended with this."""
        child = await Child.start(
            arguments[0],
            (*arguments, "--bootstrap", self.address),
            home=self._folder / f"asking-{arguments[0]}",
            log=self._folder / f"asking-{arguments[0]}.log",
            command=self._site.at(0),
        )
        try:
            yield child
        finally:
            await end_all([child])

    async def kill(self, node: int) -> None:
        """The daemon at `node`, without a word."""
        await (self.volunteers[node] if node else self.bootstrap).kill()

    async def start(self, node: int) -> None:
        """The daemon at `node` again, where it was; volunteers come back to the bootstrap node."""
        if node:
            await self.add(node, *self._options)
            return
        port = self.address.split("/")[4]
        where = [*self._site.listening(0)[:-1], port]
        self.bootstrap = await _bootstrap(self.run, self._folder, self._site, where)

    def worker(self, node: int) -> psutil.Process | None:
        """The compute worker at `node`, if there is one."""
        return self.parts(node).get("worker")

    def parts(self, node: int) -> dict[str, psutil.Process]:
        """The processes of the volunteer at `node` by kind, so far as they live."""
        found = {}
        with suppress(psutil.NoSuchProcess):
            for one in self.family(node):
                with suppress(psutil.NoSuchProcess):  # it may end at any moment
                    if kind := _kind(one):
                        found[kind] = one
        return found

    def family(self, number: int) -> list[psutil.Process]:
        """The processes of volunteer `number`: the daemon first."""
        daemon = psutil.Process(self.volunteers[number].pid)
        return [daemon, *daemon.children(recursive=True)]

    def home(self, number: int) -> Path:
        return self._folder / f"home-{number}"

    def said(self, number: int) -> str:
        """All that volunteer `number` has said on its stderr so far."""
        return (self._folder / f"volunteer-{number}.log").read_text(errors="replace")

    async def finished(self, numbers: Sequence[int], within_s: float) -> None:
        """Return when the bootstrap node and these volunteers have ended by themselves, else HP-DEMO-003.

        A volunteer that was started again late may find nobody any more, and waits.
        """
        for child in (self.bootstrap, *(self.volunteers[number] for number in numbers)):
            await child.finished(within_s)
        self.check()

    async def until(self, steps: int, within_s: float) -> None:
        """Return when so many steps are committed.

        Raises TimeoutError; HP-DEMO-003 when a process has failed.
        """
        async with asyncio.timeout(within_s):
            while self.feed.history.version < steps:
                self.check()
                await asyncio.sleep(POLL_S)
                self.feed.poll()

    def check(self) -> None:
        """Raises `LocalError` HP-DEMO-003 for a process that ended with an error; prints its last words.

        The folder with its log is often gone when somebody reads the error.
        """
        minded = [child for number, child in self.volunteers.items() if number not in self.at_liberty]
        for child in (self.bootstrap, *minded):
            if child.status:
                print(*child.last_lines(LAST_LINES), sep="\n", file=sys.stderr)
                raise child.failure()

    def processes(self) -> Mapping[str, list[psutil.Process]]:
        """All processes by kind."""
        found: dict[str, list[psutil.Process]] = {kind: [] for kind in KINDS}
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if kind := _kind(process):
                    found[kind].append(process)
        return found

    def stage_of(self, worker: psutil.Process) -> tuple[int, int]:
        """The blocks [begin, end) of a worker's volunteer, from its log. It has made an update."""
        return self.blocks_of(Path(worker.parent().environ()["HETPEER_HOME"]))

    def blocks_of(self, home: Path) -> tuple[int, int]:
        """The same of whoever has its home there."""
        lines = self._events_of(home).read_text().splitlines()
        blocks = {json.loads(line)["record"]["block"] for line in lines[-64:]}
        return min(blocks), max(blocks) + 1

    def updates(self, number: int) -> dict[Step, set[int]]:
        """The blocks that volunteer `number` has updated, by step, so far as it has signed them."""
        found: dict[Step, set[int]] = {}
        events = self._events_of(self.home(number))
        for line in events.read_text().splitlines() if events.exists() else []:
            record = json.loads(line)["record"]
            if record["kind"] == "applied":
                step = record["term"], record["view"], record["step"]
                found.setdefault(step, set()).add(record["block"])
        return found

    def has_updated(self, number: int) -> bool:
        """Whether volunteer `number` has made an update, and signed it."""
        events = self._events_of(self.home(number))
        return events.exists() and events.stat().st_size > 0

    def _events_of(self, home: Path) -> Path:
        return home / "runs" / self.run.run_id / "events.jsonl"

    def freeze(self) -> None:
        """Stop every process where it stands. For less than a lease (10 s)."""
        self._frozen = [process for group in self.processes().values() for process in group]
        _signal(self._frozen, signal.SIGSTOP)

    def thaw(self) -> None:
        _signal(self._frozen, signal.SIGCONT)
        self._frozen = []


@asynccontextmanager
async def running(
    run: RunDirectory, folder: Path, volunteers: int, *options: str, site: Site | None = None
) -> AsyncIterator[Swarm]:
    """The swarm of `run`; its processes are gone when this ends, however it does.

    `options` are the volunteers'.
    """
    site = site or Site()
    bootstrap = await _bootstrap(run, folder, site, site.listening(0))
    swarm = None
    try:
        address = (await bootstrap.next_line(START_S)).split()[-1]
        swarm = Swarm(run, folder, bootstrap, address, site, options)
        for number in range(1, volunteers + 1):
            await swarm.add(number, *options)
        yield swarm
    finally:
        if swarm is not None:
            swarm.thaw()
            await end_all([swarm.bootstrap, *swarm.volunteers.values()])
        else:
            await end_all([bootstrap])


async def _bootstrap(run: RunDirectory, folder: Path, site: Site, where: Sequence[str]) -> Child:
    arguments = ("bootstrap", str(run.path), *(["--keep-places"] if site.keep_places else []), *where)
    return await Child.start(
        "bootstrap", arguments, home=run.path, log=folder / "bootstrap.log", command=site.at(0)
    )


def cpu_seconds(processes: Sequence[psutil.Process]) -> list[float]:
    """CPU seconds of each so far, kernel and user."""
    return [sum(process.cpu_times()[:2]) for process in processes]


def _kind(process: psutil.Process) -> str | None:
    if process.name() == "p2pd":
        parent = process.parent()  # none for a moment after that was killed
        owner = _kind(parent) if parent is not None else None
        return f"{owner} p2pd" if owner else None
    command = process.cmdline()
    if any(part.endswith("worker_main") for part in command):
        return "worker"
    if ENTRIES.intersection(command):
        return "bootstrap" if "bootstrap" in command else "volunteer"
    return None


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
