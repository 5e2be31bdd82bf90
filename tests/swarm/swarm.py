"""A swarm of real processes on loopback, as the tests see it: start, hurt, wait for what the ledger says, judge.

Nothing waits for a fixed time: every wait is for a condition and has a deadline.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hetpeer.bootstrap.audit import Verdict, audit
from hetpeer.bootstrap.eventlog import read_event, read_events
from hetpeer.bootstrap.history import History
from hetpeer.bootstrap.log import read_log
from hetpeer.bootstrap.manifest import SignedManifest, sign
from hetpeer.bootstrap.replay import ReferenceRun, compare
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.dht.identity import Identity
from tests.swarm.forkserver import ForkServer
from tests.swarm.spare import NAME
from tests.wanlab.lab import Lab

T = TypeVar("T")
POLL_S = 0.05
LEAVE_S = 10.0
"""What a daemon may take to end after a signal."""


async def until(condition: Callable[[], T], what: str | Callable[[], str], within_s: float = 30.0) -> T:
    """The first true value of `condition`; `what` is told if there is none in time."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not (value := condition()):
        if asyncio.get_running_loop().time() >= deadline:
            pytest.fail(f"not within {within_s} s: {what if isinstance(what, str) else what()}")
        await asyncio.sleep(POLL_S)
    return value


@dataclass
class Child:
    """One `hetpeer` process in a session of its own."""

    name: str
    pid: int
    home: Path
    out: Path
    err: Path
    server: ForkServer

    @property
    def status(self) -> int | None:
        return self.server.status(self.pid)

    @property
    def said(self) -> str:
        """Everything on stderr so far."""
        return self.err.read_text(errors="replace") if self.err.exists() else ""

    @property
    def printed(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    @property
    def shown(self) -> dict[str, Any]:
        """The last whole line of JSON that it printed, as `hetpeer status --watch --json` does; empty before."""
        line = self.printed.rpartition("\n")[0].rpartition("\n")[2]
        shown: dict[str, Any] = json.loads(line or "{}")
        return shown

    @property
    def peer_id(self) -> str:
        return Identity.load(self.home / "identity.key").peer_id

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def helpers(self) -> dict[str, psutil.Process]:
        """Its own children: `p2pd` and `worker`, as far as they run."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):  # it, or one of them, has just ended
            for process in filter(_runs, psutil.Process(self.pid).children()):
                line = " ".join(process.cmdline())
                is_worker = process.name() == NAME or "worker_main" in line
                found["worker" if is_worker else "p2pd" if "p2pd" in line else line] = process
        return found

    async def blocks(self) -> tuple[int, int]:
        """First and last block of the place that it says it has; it says so at its next look."""
        await self.says("blocks ")
        first, last = re.findall(r"blocks (\d)-(\d)", self.said)[0]
        return int(first), int(last)

    def address(self) -> str:
        """Where its p2pd listens."""
        listening = [
            c for c in self.helpers()["p2pd"].net_connections("tcp") if c.status == psutil.CONN_LISTEN
        ]
        return f"/ip4/127.0.0.1/tcp/{listening[0].laddr.port}/p2p/{self.peer_id}"

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone, and with it its p2pd and its worker."""
        helpers = self.helpers().values()
        assert helpers
        self.signal(signal.SIGKILL)
        await self.ended()
        await until(lambda: not any(map(_runs, helpers)), f"the helpers of {self.name} are gone", 3.0)

    async def ended(self, within_s: float = 30.0) -> int:
        """Its exit status."""
        await until(
            lambda: self.status is not None, lambda: f"{self.name} ends; it said:\n{self.said}", within_s
        )
        assert self.status is not None
        return self.status

    async def says(self, text: str, within_s: float = 30.0) -> None:
        await until(lambda: text in self.said, f"{self.name} says {text!r}", within_s)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Swarm:
    """One run directory and the processes that serve and train it."""

    def __init__(self, folder: Path, run: RunDirectory, server: ForkServer) -> None:
        self.folder = folder
        self.run = run
        self.children: list[Child] = []
        self.address = ""
        self.lab: Lab | None = None
        """Where its processes are, if not on the loopback of this machine."""
        self._server = server

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    def start(
        self,
        name: str,
        *arguments: str,
        before: str = "",
        fail: str = "",
        home: Path | None = None,
        verbose: str = "-v",
        node: int = 0,
    ) -> Child:
        number = len(self.children)
        out, err = self.folder / f"{number}-{name}.out", self.folder / f"{number}-{name}.err"
        home = home or self.folder / name
        pid = self._server.start(
            arguments=[verbose, *arguments],
            home=str(home),
            out=str(out),
            err=str(err),
            before=before,
            fail=fail,
            network=self.lab.namespace(node) if self.lab else "",
        )
        child = Child(name, pid, home, out, err, self._server)
        self.children.append(child)
        return child

    async def bootstrap(self, *options: str, fail: str = "", **how: Any) -> Child:
        """Serve the run, at the port where it was served before; returns when volunteers may join. `how` as in `start`."""
        port = self.address.split("/")[4] if self.address else "0"
        child = self.reliable(self.run.path, *options, port=port, home=self.run.path, fail=fail, **how)
        await until(lambda: child.printed or child.status is not None, "the bootstrap node is ready")
        if fail and child.status == -signal.SIGKILL:
            return await self.bootstrap(*options, **how)
        assert child.status is None, child.said
        self.address = child.printed.splitlines()[0].split()[-1]
        return child

    def reliable(self, run: Path, *options: str, port: str = "0", **how: Any) -> Child:
        """A reliable peer with its own copy of the run; `how` as in `start`."""
        where = ("--host", self._host(0), "--port", port)
        return self.start("bootstrap", "bootstrap", str(run), *where, *options, **how)

    def volunteer(self, name: str, *options: str, via: str = "", node: int = 0, **how: Any) -> Child:
        """A volunteer that joins through the bootstrap node or `via`; `how` as in `start`."""
        address = ("--bootstrap", via or self.address, "--host", self._host(node), "--name", name)
        return self.start(name, "join", *address, *options, node=node, **how)

    async def without_end(self, **how: Any) -> tuple[Child, list[Child]]:
        """A run that ends when the test does, and three volunteers at work for two places: one that can be missed, and all. `how` as in `start`."""
        training = self.run.manifest.training.model_copy(update={"steps": 100_000, "checkpoint_every": 10})
        self.run = resign(self.run, training=training)
        await self.bootstrap()
        volunteers = [self.volunteer(name, **how) for name in "abc"]
        places = [await volunteer.blocks() for volunteer in volunteers]
        for volunteer in volunteers:
            await volunteer.says("you are contributing")
        one = next(v for v, place in zip(volunteers, places, strict=True) if places.count(place) == 2)
        return one, volunteers

    def _host(self, node: int) -> str:
        return self.lab.address(node) if self.lab else "127.0.0.1"

    @property
    def deaths(self) -> int:
        """Processes of ours that were killed, or killed themselves."""
        return sum(child.status == -signal.SIGKILL for child in self.children)

    def end(self) -> None:
        """Kill what is left, then check what everybody said."""
        for child in self.children:
            if child.status is None:
                child.signal(signal.SIGKILL)
        for child in self.children:
            for noise in ("Traceback", "never retrieved", "HP-SYS-000"):
                assert noise not in child.said, f"{child.name}:\n{child.said}"

    # ── the ledger ───────────────────────────────────────────────────────────────────────────────────────────────

    def records(self, kind: str = "") -> list[dict[str, Any]]:
        """What the coordinator's log says; of one kind, or all of it."""
        return [r for r in read_log(self.run.log_path) if not kind or r["kind"] == kind]

    async def left_in_order(self, volunteers: list[Child]) -> None:
        """Everybody leaves once what they have trained is stored, the bootstrap node last; all of it is in the log."""
        stored = len(self.records("checkpoint"))
        await until(
            lambda: len(self.records("checkpoint")) > stored, "what they trained is stored", within_s=60.0
        )
        for child in (*volunteers, self.children[0]):
            child.signal(signal.SIGINT)
            await child.ended()
        assert self.judged().steps

    @property
    def version(self) -> int:
        return History.of(self.records()).version

    async def committed(self, steps: int, within_s: float = 60.0) -> None:
        """Return when `steps` steps are committed."""

        def reached() -> bool:
            return self.version >= steps

        await until(reached, f"{steps} steps; {self._voices()}", within_s)

    async def stored(self, steps: int, within_s: float = 30.0) -> None:
        """Return when a state of so many steps is in the store: with a block's last holder that leaves the rest is gone."""
        await until(
            lambda: any(record["version"] >= steps for record in self.records("checkpoint")),
            f"{steps} steps are stored; {self._voices()}",
            within_s,
        )

    def lives(self, child: Child) -> int:
        """How many incarnations of it have told the coordinator of an update."""
        path = self.run.volunteers / f"{child.peer_id}.jsonl"
        events = (read_event(line)[1] for _, line in read_events(path)) if path.exists() else ()
        return len({event["incarnation"] for event in events})

    async def gone(self, child: Child, within_s: float = 15.0) -> dict[str, Any]:
        """The record that says so: the coordinator has given `child` up."""
        peer = child.peer_id

        def record() -> dict[str, Any] | None:
            return next((r for r in self.records("gone") if r["peer"] == peer), None)

        return await until(record, f"{child.name} is gone", within_s)  # type: ignore[return-value]

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def finished(self, *children: Child, within_s: float = 60.0) -> None:
        """Return when the run is over and all of `children` have ended well."""
        for child in children:
            assert await child.ended(within_s) == 0, f"{child.name}:\n{child.said}"

    def judged(self) -> Verdict:
        """What the audit says of it: exactly once, by the volunteers' signed logs."""
        verdict = audit(self.run.path)
        assert verdict.ok, verdict.problems
        return verdict

    def exact(self, reference: ReferenceRun) -> None:
        """Exactly once, and number for number what one machine computes."""
        verdict = self.judged()
        comparison = compare(self.run.path, reference)
        assert comparison.ok, comparison.problems
        assert comparison.max_relative_loss_difference <= 1e-6
        assert comparison.steps == verdict.steps_planned

    def _voices(self) -> str:
        return "\n".join(f"── {child.name}\n{child.said[-1500:]}" for child in self.children)


async def scraped(child: Child) -> dict[tuple[str, ...], float]:
    """Name and labels of each sample that a daemon with a dashboard serves, and its value."""
    await child.says("dashboard at ")
    (url,) = re.findall(r"dashboard at (\S+)/#", child.said)
    with await asyncio.to_thread(urllib.request.urlopen, f"{url}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def resign(run: RunDirectory, **changes: Any) -> RunDirectory:
    """The same run with other fields in its manifest, signed by its owner again."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes((run.path / "owner.key").read_bytes())
    signed: SignedManifest = run.signed
    (run.path / "manifest.hetpeer").write_bytes(sign(signed.manifest.model_copy(update=changes), key))
    return RunDirectory.open(run.path)
