"""A swarm of real processes on loopback, as the tests see it: start, hurt, wait for what the ledger says,
judge.

Nothing waits for a fixed time: every wait is for a condition and has a deadline.
"""

import asyncio
import re
import signal
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from hetpeer.bootstrap.audit.audit import AuditVerdict, audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.log.volunteer_log import read_event, read_events
from hetpeer.bootstrap.run.manifest import SignedManifest, sign
from hetpeer.bootstrap.run.run_directory import RunDirectory
from tests.swarm.child import BUSY_S, Child, over, until
from tests.swarm.forkserver import ForkServer
from tests.wanlab.lab import Lab


class Swarm:
    """One run directory and the processes that serve and train it."""

    def __init__(self, folder: Path, run: RunDirectory, server: ForkServer) -> None:
        self.folder = folder
        self.run = run
        self.children: list[Child] = []
        self.address = ""
        self.lab: Lab | None = None
        """Where its processes are, if not on the loopback of this machine."""
        self.listens = ""
        """Where the bootstrap node listens; empty: at its first address."""
        self._server = server
        self._served_by: list[psutil.Process] = []
        """The helpers of the bootstrap node, which keep its port a little longer than they have it for a
        parent.
        """

    # ── processes ───────────────────────────────────────────────────────────────────────────────────────────

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

    async def bootstrap(
        self, *options: str, fail: str = "", together: int = 0, before: str = "", **how: Any
    ) -> Child:
        """Serve the run, at the port where it was served before; returns when volunteers may join. `how`
        as in `start`.

        The run is held until so many volunteers as `together` have their places and are ready, so none of
        them can be late for it.
        """
        if together:
            before = f"{before} begins_with:{together}"
        await over(self._served_by, "the port of the bootstrap node is free again")
        port = self.address.split("/")[4] if self.address else "0"
        child = self.reliable(
            self.run.path, *options, port=port, home=self.run.path, fail=fail, before=before, **how
        )
        await until(lambda: child.printed or child.status is not None, "the bootstrap node is ready")
        if fail and child.status == -signal.SIGKILL:
            return await self.bootstrap(*options, together=together, before=before, **how)
        assert child.status is None, child.said
        self._served_by = list(child.helpers().values())
        self.address = child.printed.splitlines()[0].split()[-1]
        return child

    def reliable(self, run: Path, *options: str, port: str = "0", **how: Any) -> Child:
        """A reliable peer with its own copy of the run; `how` as in `start`."""
        where = ("--host", self.listens or self._host(0), "--port", port)
        return self.start("bootstrap", "bootstrap", str(run), *where, *options, **how)

    def volunteer(self, name: str, *options: str, via: str = "", node: int = 0, **how: Any) -> Child:
        """A volunteer that joins through the bootstrap node or `via`; `how` as in `start`."""
        address = ("--bootstrap", via or self.address, "--host", self._host(node), "--name", name)
        return self.start(name, "join", *address, *options, node=node, **how)

    async def without_end(self, before: str = "", serves: str = "patient") -> tuple[Child, list[Child]]:
        """A run that ends when the test does, and three volunteers at work for two places: one that can be
        missed, and all.

        `before` is, as in `start`, what is wrong with them, `serves` with the bootstrap node.
        """
        training = self.run.manifest.training.model_copy(update={"steps": 100_000, "checkpoint_every": 10})
        self.run = resign(self.run, training=training)
        await self.bootstrap(together=3, before=serves)
        volunteers = [self.volunteer(name, before=f"{before} polite") for name in "abc"]
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
                with suppress(ProcessLookupError):  # killed a moment ago: nobody has written its status yet
                    child.signal(signal.SIGKILL)
        for child in self.children:
            for noise in ("Traceback", "never retrieved", "HP-SYS-000"):
                assert noise not in child.said, f"{child.name}:\n{child.said}"

    # ── the ledger ──────────────────────────────────────────────────────────────────────────────────────────

    def records(self, kind: str = "") -> list[dict[str, Any]]:
        """What the coordinator's log says; of one kind, or all of it."""
        return [r for r in read_log(self.run.log_path) if not kind or r["kind"] == kind]

    async def left_in_order(self, volunteers: list[Child]) -> None:
        """Everybody leaves once what they have trained is stored, the bootstrap node last; all of it is in
        the log.
        """
        stored = len(self.records("checkpoint"))
        await until(
            lambda: len(self.records("checkpoint")) > stored, "what they trained is stored", within_s=200.0
        )
        await self.left(volunteers)

    async def left(self, volunteers: list[Child]) -> None:
        """Everybody leaves, the bootstrap node last; what was stored before is in the log."""
        for child in (*volunteers, self.children[0]):
            child.signal(signal.SIGINT)
            await child.ended()
        assert self.judged().steps

    @property
    def version(self) -> int:
        return History.of(self.records()).version

    async def committed(self, steps: int, within_s: float = 2 * BUSY_S) -> None:
        """Return when `steps` steps are committed."""

        def reached() -> bool:
            return self.version >= steps

        await until(reached, f"{steps} steps; {self.voices()}", within_s)

    async def stored(self, steps: int, within_s: float = 2 * BUSY_S) -> None:
        """Return when a state of so many steps is in the store: with a block's last holder that leaves the
        rest is gone.
        """
        await until(
            lambda: any(record["version"] >= steps for record in self.records("checkpoint")),
            f"{steps} steps are stored; {self.voices()}",
            within_s,
        )

    def lives(self, child: Child) -> int:
        """How many incarnations of it have told the coordinator of an update."""
        path = self.run.volunteers / f"{child.peer_id}.jsonl"
        events = (read_event(line)[1] for _, line in read_events(path)) if path.exists() else ()
        return len({event["incarnation"] for event in events})

    def updates(self, child: Child) -> int:
        """How many updates it has told the coordinator of."""
        path = self.run.volunteers / f"{child.peer_id}.jsonl"
        return len(list(read_events(path))) if path.exists() else 0

    async def gone(self, child: Child, within_s: float = BUSY_S) -> dict[str, Any]:
        """The record that says so: the coordinator has given `child` up."""
        peer = child.peer_id

        def record() -> dict[str, Any] | None:
            return next((r for r in self.records("gone") if r["peer"] == peer), None)

        return await until(record, f"{child.name} is gone", within_s)  # type: ignore[return-value]

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────

    async def finished(self, *children: Child, within_s: float = 3 * BUSY_S) -> None:
        """Return when the run is over and all of `children` have ended well."""
        for child in children:
            assert await child.ended(within_s) == 0, f"{child.name}:\n{child.said}"

    def judged(self) -> AuditVerdict:
        """What the audit says of it: exactly once, by the volunteers' signed logs."""
        verdict = audit(self.run.path)
        assert verdict.ok, verdict.problems
        return verdict

    def exact(self) -> None:
        """Exactly once, and what one machine computes, to the last bit."""
        assert self.judged().steps_planned == self._as_on_one_machine()

    def exact_so_far(self) -> None:
        """As `exact`, of a run that has no end yet."""
        assert self.judged().steps == self._as_on_one_machine() > 0

    def _as_on_one_machine(self) -> int:
        """How many steps the run has: all of them are those of one machine."""
        replayed = replay(self.run.path, processes=1)
        assert replayed.ok, replayed.problems
        assert replayed.equal == replayed.steps, replayed.why
        return replayed.steps

    def voices(self) -> str:
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
