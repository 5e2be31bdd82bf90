"""Node, run files, log and credentials of a volunteer: the parts that outlive the compute worker and last
through a pause.

Credentials are for admission to the run (docs/admission.md): the voucher of an invite, and a proof of work.
Both are kept in the home beside the run's files: an invite is needed once, and the work is done once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.admission.admission import Admission
from hetpeer.bootstrap.admission.proof_of_work import MAX_NONCE_BYTES, find_proof, is_proof
from hetpeer.bootstrap.run.durable_files import atomic_write
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.vouchers import VOUCHER
from hetpeer.bootstrap.storage.file_service import PROTOCOL as FILES
from hetpeer.bootstrap.storage.file_service import FileService, Served, ServedRunFiles, StateSource
from hetpeer.dht.base.errors import short_id
from hetpeer.dht.base.runtime import SystemClock, TaskSet, aside
from hetpeer.dht.discovery import Advert, Roster
from hetpeer.dht.identity.addresses import Address
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.arrival.destinations import Destination, known_run
from hetpeer.peer.arrival.find_run import FoundRun, arrived
from hetpeer.peer.arrival.lan_notices import chosen
from hetpeer.peer.daemon.volunteer_progress import VolunteerProgress
from hetpeer.peer.limits.amounts import size
from hetpeer.peer.limits.settings import Settings
from hetpeer.peer.limits.web_address import Where
from hetpeer.peer.preparation.disk_room import Room
from hetpeer.peer.preparation.state_fetcher import RunFiles
from hetpeer.peer.probing.coordinate_keeper import kept_coordinate
from hetpeer.peer.probing.measurement_service import BUDGET as LINES_BUDGET
from hetpeer.peer.probing.measurement_service import PROTOCOL as LINES
from hetpeer.peer.probing.measurement_service import MeasurementService
from hetpeer.peer.probing.probe_service import BUDGET as PROBE_BUDGET
from hetpeer.peer.probing.probe_service import PROTOCOL as PROBES
from hetpeer.peer.probing.probe_service import VOLUNTEER_BYTES, ProbeService
from hetpeer.peer.process.console import say
from hetpeer.peer.process.home import Home
from hetpeer.peer.process.lifecycle import watch_sleep
from hetpeer.peer.process.span_trace import Trace
from hetpeer.peer.training.evidence_log import EvidenceLog
from hetpeer.peer.training.volunteer import Volunteer
from hetpeer.peer.training.volunteer_figures import Credentials
from hetpeer.stages.planning.network_coordinates import OwnCoordinate


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """Options of `hetpeer join`."""

    bootstrap: tuple[Address, ...]
    run: str = ""
    """The id of the run that it must be; empty: whichever is there."""
    voucher: bytes = b""
    """Voucher of the invite, for admission to the run."""
    home: Path
    settings: Settings
    """Settings at the start."""
    for_s: float | None = None
    """Seconds for which it takes part; None: without end."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Key of each setting that is not a default → its source."""
    trace: bool = False
    """Whether to record spans of the work (span_trace.py)."""
    dashboard: Where | None = None
    """Address of its dashboard and metrics; None: none."""


@dataclass(slots=True)
class Life:
    """The volunteer that lives now, if one does."""

    volunteer: Volunteer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """Node and run of this volunteer, with its files, log and credentials."""

    node: Node
    home: Home
    files: RunFiles
    credentials: Credentials
    roster: Roster
    evidence: EvidenceLog
    trace: Trace
    progress: VolunteerProgress
    life: Life
    coordinate: OwnCoordinate
    adverts: Mapping[str, Advert]
    """Adverts of the run's other peers at the last look."""

    async def serve(self, states: StateSource) -> None:
        """Give others the run's files, and states from `states`, until something else is said."""
        shelf = ServedRunFiles(self.files.run, self.files.membership_config, states)
        self.node.listener.reliable = lambda: self.files.membership_config.peers
        await self.node.serve(FILES, FileService(shelf, self.node.listener.knows).handle)

    async def serve_probes(self, allowed: Callable[[], bool]) -> None:
        """Let newcomers probe their lines with us, and coordinators have ours measured, whenever `allowed`.

        Docs: joining.md, and planning.md, "Asked before moved".
        """
        service = ProbeService(VOLUNTEER_BYTES, lambda: self.coordinate.numbers)

        async def answer(stream: Stream) -> None:
            await (service.handle(stream) if allowed() else _refused(stream))

        await self.node.serve(PROBES, answer, PROBE_BUDGET)
        measuring = MeasurementService(self.node, lambda: self.files.membership_config.peers, allowed)
        await self.node.serve(LINES, measuring.handle, LINES_BUDGET)

    async def serve_nothing(self) -> None:
        """Give others no files, until something else is said."""
        await self.node.serve(FILES, _refused)

    async def mind_sleep(self, after: Callable[[], None]) -> None:
        """Whenever the machine has slept, connect to the network anew and call `after`. Never returns."""

        async def woken() -> None:
            await self.node.renew()
            after()

        await watch_sleep(SystemClock(), woken)


async def present(
    options: JoinOptions, home: Home, stack: contextlib.AsyncExitStack, settings: Callable[[], Settings]
) -> Presence:
    """Join and fetch the manifest; `stack` ends it. `settings` gives present settings. Raises LocalError."""
    identity, network = home.identity(), options.settings.network
    arrival = await stack.enter_async_context(await arriving(options, home))
    node, signed = arrival.node, arrival.signed
    run = home.run(signed)
    if network.lan:
        from hetpeer.peer.arrival.lan_discovery import announce_forever

        saying = TaskSet()
        stack.push_async_callback(saying.close)
        saying.spawn(
            announce_forever(node, network.host, run.run_id, signed.manifest.name),
            name="word in the local network",
        )
    named = options.settings.node.name
    short = short_id(identity.peer_id)
    who = f"{named} ({short})" if named else f"{short} (no name; give one with --name)"
    say(f"in the run {signed.manifest.name} as {who}")
    room = Room(run.path.parent, run.run_id, lambda: size(settings().limits.files))
    evidence = stack.enter_context(contextlib.closing(EvidenceLog(home, run, identity)))
    path = home.trace_path(run, os.getpid()) if options.trace else None
    trace = stack.enter_context(
        contextlib.closing(Trace(SystemClock(), path, peer=identity.peer_id, name=options.settings.node.name))
    )
    return Presence(
        node=node,
        home=home,
        credentials=await credentials(run, identity.peer_id, options.voucher),
        files=RunFiles(node, run, MembershipConfig(signed, run.path), [arrival.source], room),
        roster=Roster(node, run.run_id),
        evidence=evidence,
        trace=trace,
        progress=VolunteerProgress(signed.manifest, lambda: node.listener.throttle.down.nbytes),
        life=Life(),
        coordinate=kept_coordinate(node.peer_id, home.path),
        adverts=arrival.adverts,
    )


async def arriving(
    options: JoinOptions, home: Home, *, stays: bool = True
) -> contextlib.AbstractAsyncContextManager[FoundRun]:
    """Context manager that joins the network of the run in `options`; `stays` as in `arrived`.

    Raises `LocalError` HP-ADDR-004, HP-NET-016.
    """
    network, goal = options.settings.network, Destination(options.bootstrap, options.run)
    if network.lan and not goal.addresses:
        goal = await _nearby(network.host, goal.run, home)
    config = NodeConfig(
        host=network.host,
        port=network.port,
        direct_port=network.direct_port,
        peers=goal.addresses,
        reachability="ask",
    )
    return arrived(config, home, goal.run, stays=stays)


async def _nearby(host: str, run: str, home: Home) -> Destination:
    """A run in the local networks of `host`: `run` if named; if nobody there has it, by the addresses known
    before.

    Raises `LocalError` HP-ADDR-004, HP-NET-016.
    """
    from hetpeer.peer.arrival.lan_discovery import heard

    say("looking for a run in the local network")
    found = await heard(host, run)
    back = Destination((), run)
    if not any(one.run == run for one in found) and known_run(home.path, back) is not None:
        say("nobody there is in the run joined before: back to it as it was found then")
        return back
    goal = chosen(found, run)
    name = next(one.name for one in found if one.run == goal.run)
    say(f"found the run {name or 'without a name'} ({goal.run})")
    return goal


async def _refused(stream: Stream) -> None:
    stream.abort()


@contextlib.asynccontextmanager
async def no_state(_cluster: int, _version: int, _block: int) -> AsyncIterator[Served | None]:
    """State source of a peer without states."""
    yield None


# ── credentials ─────────────────────────────────────────────────────────────────────────────────────────────


async def credentials(run: RunDirectory, peer: str, voucher: bytes) -> Credentials:
    """Credentials of `peer` in `run`; `voucher`: of the present invite, if any.

    The proof of work is done in a thread that neither a cancellation nor the end of the process waits for.
    Raises `LocalError` HP-DISK-*.
    """
    settings = run.manifest.admission
    kept = run.path / "voucher"
    if voucher:
        atomic_write(kept, voucher, mode=0o600)
    bits, work = settings.work_bits, b""
    if bits:
        work = await aside(lambda: _proof(run, peer, bits), name="proof of work")
    return Credentials(voucher or _read(kept, VOUCHER.max_bytes), work)


def refusal(run: RunDirectory, peer: str, voucher: bytes) -> m.Rejected | None:
    """Reason for which every coordinator refuses `peer`, as far as the amendment decides; else None.

    Only the log knows earlier admissions, so an expired invite may still do. Proofs of work are not checked
    here.
    """
    manifest = run.manifest
    settings = manifest.admission.model_copy(update={"work_bits": 0, "per_network": 0})
    door = Admission(run.run_id, manifest.owner, settings)
    if run.signed.amendment is not None:
        door.amended(run.signed.amendment.amendment)
    shown = voucher or _read(run.path / "voucher", VOUCHER.max_bytes)
    judged = door.judge(peer, m.Hello(run=run.run_id, incarnation=0, voucher=shown), 0.0, "", ())
    return judged if isinstance(judged, m.Rejected) else None


def _proof(run: RunDirectory, peer: str, bits: int) -> bytes:
    path = run.path / "work"
    nonce = _read(path, MAX_NONCE_BYTES)
    if not is_proof(nonce, run.run_id, peer, bits):
        say(f"working for the proof of {bits} bits that the run asks for")
        nonce = find_proof(run.run_id, peer, bits)
        atomic_write(path, nonce, mode=0o600)
    return nonce


def _read(path: Path, limit: int) -> bytes:
    """Content of the file; empty if it is missing, too long or unreadable."""
    try:
        data = path.read_bytes()
    except OSError:
        return b""
    return data if len(data) <= limit else b""
