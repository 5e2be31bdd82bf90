"""Sources of the metrics: parts of a running daemon, read at each request of `/metrics` (Prometheus)."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hetpeer.averaging.member.work_in_progress import WorkerOccupation
from hetpeer.bootstrap.state.effects import CoordinatorState
from hetpeer.bootstrap.storage.training_curve import group_norms, learning_rate
from hetpeer.peer.limits.amounts import rate, volume
from hetpeer.peer.limits.governor import Reason
from hetpeer.peer.watching.metric_families import (
    DaemonFigures,
    LimitFigures,
    LogMetrics,
    ReliableFigures,
    SwarmFigures,
    VolunteerMetricFigures,
    daemon_metrics,
    gpu_metrics,
    limit_metrics,
    reliable_metrics,
    volunteer_metrics,
)
from hetpeer.peer.web.machine_warnings import CODES, MachineWarnings

if TYPE_CHECKING:
    from hetpeer.bootstrap.run.settings import TrainingSettings
    from hetpeer.dht.node.node import Node
    from hetpeer.peer.daemon.limits_in_force import LimitsInForce
    from hetpeer.peer.reliable.reliable_peer import ReliablePeer
    from hetpeer.peer.training.volunteer import Volunteer

FOLLOWING = "following"
RELIABLE_STATES = (FOLLOWING, *(state.value for state in CoordinatorState))


@dataclass(eq=False)
class DaemonSource:
    """Metrics of any daemon: node, processes and machine. `folder` has its files."""

    _node: Node
    _role: str
    _run: str
    _folder: Path
    _states: tuple[str, ...]
    _warnings: MachineWarnings
    _process: psutil.Process = field(default_factory=psutil.Process)

    def look(self, state: str) -> DaemonFigures:
        """Current figures; takes a few milliseconds."""
        resident: Counter[str] = Counter()
        cpu: defaultdict[str, float] = defaultdict(float)
        for what, process in self._processes():
            with contextlib.suppress(psutil.Error):  # it has just ended
                times = process.cpu_times()
                resident[what] += process.memory_info().rss
                cpu[what] += times.user + times.system
        return DaemonFigures(
            version=version("hetpeer"),
            role=self._role,
            run=self._run,
            state=state,
            states=self._states,
            started=self._process.create_time(),
            resident=resident,
            cpu=cpu,
            memory_available=psutil.virtual_memory().available,
            disk_free=psutil.disk_usage(str(self._folder)).free,
            reach=self._node.reach_estimate.reach.value,
            relays=len(self._node.relays),
            p2pd_restarts=self._node.restarts,
            dht_refused=self._node.dht.refused,
            transmitted=self._node.listener.throttle.up.nbytes,
            received=self._node.listener.throttle.down.nbytes,
            warnings=frozenset(warning.code for warning in self._warnings.look()),
            warned_of=CODES,
        )

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        yield "daemon", self._process
        for child in self._process.children(recursive=True):
            yield "p2pd" if child.pid == self._node.p2pd_pid else "worker", child


@dataclass(eq=False)
class VolunteerSource:
    """Metrics of a volunteer, its limits and GPU. `state`: the daemon's; `volunteer`: the living one, if any;
    `credit`: if known.
    """

    _daemon: DaemonSource
    _state: Callable[[], str]
    _volunteer: Callable[[], Volunteer | None]
    _credit: Callable[[], int | None]
    _governing: LimitsInForce

    def metrics(self) -> Iterator[Metric]:
        """All metrics."""
        volunteer, readings = self._volunteer(), self._governing.readings
        gpus = readings.gpus if readings is not None else ()
        offer = None if volunteer is None else volunteer.offer
        offered = offer.memory.device if offer is not None and offer.memory.apart and len(gpus) == 1 else None
        yield from daemon_metrics(self._daemon.look(self._state()))
        yield from limit_metrics(_limits(self._governing))
        yield from gpu_metrics(gpus, offered)
        if volunteer is not None:
            yield from volunteer_metrics(_of_volunteer(volunteer, self._credit()))


def _limits(governing: LimitsInForce) -> LimitFigures:
    limits = governing.settings.limits
    return LimitFigures(
        transmit_rate=rate(limits.up),
        receive_rate=rate(limits.down),
        transfer_cap=volume(limits.transfer_cap),
        month_bytes=governing.month_bytes,
        cores=limits.cpu,
        celsius={"gpu": limits.temperature_c, "cpu": limits.cpu_temperature_c},
        gpu_watts=limits.gpu_power_w,
        holding=frozenset(governing.holding),
        reasons=tuple(Reason),
    )


def _of_volunteer(volunteer: Volunteer, credit: int | None) -> VolunteerMetricFigures:
    member, figures, links = volunteer.member, volunteer.figures, volunteer.links
    begin, end = member.place or (0, 0)
    lately = figures.shares.lately(time.monotonic())
    return VolunteerMetricFigures(
        connected=volunteer.session.is_up,
        step=member.version,
        loss=member.loss,
        blocks=end - begin,
        microbatches=figures.microbatches,
        tokens_per_second=volunteer.tokens_per_second,
        done=links.done,
        spent=links.spent,
        occupied={one.value: seconds for one, seconds in figures.shares.seconds.items()},
        bubble=lately[WorkerOccupation.DATA] + lately[WorkerOccupation.ROOM],
        raw_bytes=links.raw_bytes,
        sent_bytes=links.sent_bytes,
        trips=tuple(link.trip_s for link in links.links.values() if link.trip_s),
        memory_limit=volunteer.offer.memory.device,
        main_memory_limit=volunteer.offer.memory.host,
        credit=credit,
    )


class ReliableSource:
    """Metrics of a reliable peer; steps of `training` are batches if the run is `grouped`."""

    def __init__(
        self, daemon: DaemonSource, peer: ReliablePeer, training: TrainingSettings, *, grouped: bool
    ) -> None:
        self._daemon = daemon
        self._peer = peer
        self._training = training
        self._grouped = grouped
        self._log = LogMetrics(partial(group_norms, training))
        self._read = 0
        """Records of the log that are counted."""

    def metrics(self) -> Iterator[Metric]:
        """All metrics."""
        peer, records = self._peer, self._peer.replica.records
        while self._read < len(records):
            self._log.add(records[self._read])
            self._read += 1
        service = peer.service
        yield from daemon_metrics(
            self._daemon.look(FOLLOWING if service is None else service.core.state.value)
        )
        yield from reliable_metrics(self._figures())
        yield from self._log.metrics()

    def _figures(self) -> ReliableFigures:
        replica, service = self._peer.replica, self._peer.service
        credit, history = replica.credit.of, replica.history
        swarm = None
        if service is not None:
            working = service.core.working()
            swarm = SwarmFigures(
                volunteers=service.core.volunteers,
                working=len(working),
                tokens_per_second=service.tokens_per_second(),
                holders={
                    block: sum(begin <= block < end for begin, end in working.values())
                    for block in range(service.blocks)
                },
            )
        if service is not None:
            done, last = service.core.done, service.core.last
        elif self._grouped:
            done, last = None, []  # only who coordinates has the clusters' books
        else:
            done, last = (
                history.version,
                [history.commits[s] for s in (history.version - 1,) if s in history.commits],
            )
        newest = max((commit["batch"] for commit in last), default=None)
        return ReliableFigures(
            leading=replica.is_leading,
            members=len(replica.members),
            done=done,
            steps=self._training.steps,
            loss=fmean(commit["loss"] for commit in last) if last else None,
            gradient_norm=fmean(commit["norm"] for commit in last) if last else None,
            learning_rate=learning_rate(self._training, newest) if newest is not None else None,
            stored=self._peer.stored,
            best=self._peer.best,
            credit=sum(credit.values()),
            contributors=len(credit),
            swarm=swarm,
        )


def metrics_route(look: Callable[[], Iterable[Metric]]) -> Route:
    """Route of `/metrics`; `look` is called on the loop for each request."""
    registry = CollectorRegistry()
    registry.register(_Looking(look))

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    return Route("/metrics", metrics)


class _Looking(Collector):
    def __init__(self, look: Callable[[], Iterable[Metric]]) -> None:
        self._look = look

    def collect(self) -> Iterable[Metric]:
        return self._look()
