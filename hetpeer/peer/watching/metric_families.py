"""Metrics of a daemon in Prometheus's form: names, units and labels (docs/metrics.md). Pure: figures in,
families out.

Labels have few values, all known beforehand; a peer's id is never one. What is not known has no sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from prometheus_client import Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric

from hetpeer.peer.limits.nvml import GpuState

PREFIX = "hetpeer_"
KINDS = (
    *("commit", "rollback", "checkpoint", "evaluation", "gone", "reign", "planned", "arranged", "backups"),
    *("moved", "amendment", "halt", "founded", "dissolved", "average", "installed"),
)
"""Kinds of records that are counted separately."""
OTHER = "other"
SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds of a histogram's buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonFigures:
    """Figures of any daemon. Times in seconds, sizes in bytes."""

    version: str
    role: str
    """volunteer or reliable."""
    run: str
    state: str
    states: tuple[str, ...]
    """All possible states."""
    started: float
    """Start of the process, in seconds since 1970."""
    resident: Mapping[str, int]
    """Process (daemon, worker, p2pd) → memory that it has."""
    cpu: Mapping[str, float]
    """Process → time that it computed."""
    memory_available: int
    """Free memory of the machine."""
    disk_free: int
    """Free bytes of the disk with its files."""
    reach: str
    """public, private or unknown."""
    relays: int
    """Peers through which this peer is reached."""
    p2pd_restarts: int
    dht_refused: int
    """How often a record under the run's keys in the DHT was offered that its peer did not write."""
    transmitted: int
    """Bytes sent by its node over streams; `received` likewise."""
    received: int
    warnings: frozenset[str]
    """Codes of what is wrong with it now."""
    warned_of: tuple[str, ...]
    """All possible values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFigures:
    """Limits on a volunteer's use of the machine; 0 and infinity: no limit."""

    transmit_rate: float
    """Bytes/s."""
    receive_rate: float
    transfer_cap: float
    """Bytes a month, sent and received."""
    month_bytes: int
    cores: int
    celsius: Mapping[str, int]
    """gpu, cpu → highest allowed temperature in °C."""
    gpu_watts: int
    holding: frozenset[str]
    """Reasons for which the volunteer is held back now."""
    reasons: tuple[str, ...]
    """All possible values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolunteerMetricFigures:
    """Figures of a volunteer with a compute worker."""

    connected: bool
    """Whether a stream to the coordinator is open."""
    step: int | None
    loss: float | None
    blocks: int
    """Number of blocks that the volunteer holds."""
    microbatches: int
    tokens_per_second: float
    done: Mapping[str, int]
    """forward, backward, encode, decode → how often."""
    spent: Mapping[str, float]
    """Kind of task → seconds in all."""
    occupied: Mapping[str, float]
    """Occupation of its worker (computes, room, data, step) → seconds."""
    bubble: float
    """Share of the last minute that it waited while a step ran."""
    raw_bytes: int
    sent_bytes: int
    trips: tuple[float, ...]
    """Round trips in seconds, to each peer for which one is known."""
    memory_limit: int
    main_memory_limit: int
    credit: int | None = None
    """Credit as a reliable peer said last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableFigures:
    """Figures of a reliable peer, from its replica of the log."""

    leading: bool
    members: int
    done: int | None
    """Steps that are committed, or batches."""
    steps: int
    loss: float | None
    gradient_norm: float | None
    """2-norm of the last committed step's gradient before clipping; the mean of all clusters."""
    learning_rate: float | None
    """Learning rate of the last committed step."""
    stored: int
    """The version of the newest checkpoint on its disk."""
    best: int | None
    """The version of the checkpoint with the lowest held-out loss; None: none is evaluated."""
    credit: int
    contributors: int
    swarm: SwarmFigures | None = None
    """Figures of the swarm, while the peer coordinates; else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmFigures:
    """The coordinator's view of the swarm."""

    volunteers: int
    working: int
    tokens_per_second: float
    holders: Mapping[int, int] = field(default_factory=dict)
    """Block → peers that hold its current state."""


def daemon_metrics(seen: DaemonFigures) -> Iterator[Metric]:
    """Metrics of any daemon."""
    yield InfoMetricFamily(
        f"{PREFIX}build",
        "Version of hetpeer, role and run",
        {"version": seen.version, "role": seen.role, "run": seen.run},
    )
    yield _gauge("start_time_seconds", "When the daemon started, since 1970", seen.started)
    yield _gauges(
        "state", "1 for the state it is in", ("state",), {s: float(s == seen.state) for s in seen.states}
    )
    yield _gauges(
        "process_resident_memory_bytes", "Memory of daemon, worker and p2pd", ("process",), seen.resident
    )
    yield _counters("process_cpu_seconds", "Time that they computed", ("process",), seen.cpu)
    yield _gauge("memory_available_bytes", "Memory of this machine that is free", seen.memory_available)
    yield _gauge("disk_free_bytes", "Disk that is free where the daemon's files are", seen.disk_free)
    ways = {way: float(way == seen.reach) for way in ("public", "private", "unknown")}
    yield _gauges(
        "reachable", "1 for how others reach it: public takes connections, private does not", ("via",), ways
    )
    yield _gauge("relay_connections", "Reliable peers through which it is reached", seen.relays)
    yield _counter("p2pd_restarts", "How often its network process was started again", seen.p2pd_restarts)
    yield _counter("dht_refused", "Offers of foreign records under the run's keys", seen.dht_refused)
    yield _counter("network_transmit_bytes", "Sent over streams, since it started", seen.transmitted)
    yield _counter("network_receive_bytes", "Received over streams, since it started", seen.received)
    wrong = {code: float(code in seen.warnings) for code in seen.warned_of}
    yield _gauges("warning", "1 for what is wrong with it or its machine", ("code",), wrong)


def limit_metrics(seen: LimitFigures) -> Iterator[Metric]:
    """Metrics of a volunteer's limits."""
    yield _limit("network_transmit_limit_bytes_per_second", "That it may send", seen.transmit_rate)
    yield _limit("network_receive_limit_bytes_per_second", "That it may receive", seen.receive_rate)
    yield _limit("transfer_cap_bytes", "That it may send and receive in a month", seen.transfer_cap)
    yield _gauge("transfer_month_bytes", "That it has sent and received in this month", seen.month_bytes)
    yield _limit("cpu_limit_cores", "Processor cores that all of it may use", seen.cores)
    hot = {what: celsius for what, celsius in seen.celsius.items() if celsius}
    yield _gauges("temperature_limit_celsius", "At which it pauses", ("of",), hot)
    yield _limit("gpu_power_limit_watts", "That its GPU may draw on average", seen.gpu_watts)
    held = {reason: float(reason in seen.holding) for reason in seen.reasons}
    yield _gauges("held", "1 for each reason that holds it back", ("reason",), held)


def gpu_metrics(gpus: Sequence[GpuState], offered: int | None) -> Iterator[Metric]:
    """Metrics of the GPU in use, or of all that may be; `offered`: bytes of the only one."""
    if not gpus:
        return
    cards = GaugeMetricFamily(f"{PREFIX}gpu_info", "Its model", labels=("gpu", "model"))
    for gpu in gpus:
        cards.add_metric((str(gpu.number), gpu.load.name), 1.0)
    yield cards

    def each(name: str, what: str, read: Callable[[GpuState], float | None]) -> Metric:
        known = {str(gpu.number): value for gpu in gpus if (value := read(gpu)) is not None}
        return _gauges(name, what, ("gpu",), known)

    yield each("gpu_utilization_ratio", "Of the last moments, that something ran", lambda gpu: gpu.load.busy)
    yield each("gpu_memory_used_bytes", "By all programs", lambda gpu: gpu.load.memory_used)
    yield each("gpu_memory_total_bytes", "That it has", lambda gpu: gpu.load.memory_total)
    yield each("gpu_memory_limit_bytes", "Of it, that is offered", lambda _: offered)
    yield each("gpu_temperature_celsius", "How hot it is", lambda gpu: gpu.celsius)
    yield each("gpu_power_watts", "What it draws, on average since the last look", lambda gpu: gpu.watts)


def volunteer_metrics(seen: VolunteerMetricFigures) -> Iterator[Metric]:
    """Metrics of a volunteer."""
    yield _gauge("coordinator_connected", "Whether a coordinator answers it", seen.connected)
    yield _gauge("step", "Updates of the parameters that it has", seen.step)
    yield _gauge("loss", "Of the last committed step", seen.loss)
    yield _gauge("blocks", "Blocks of the model that it has a place for", seen.blocks)
    yield _counter("microbatches", "Microbatches run forward and backward here", seen.microbatches)
    yield _gauge("tokens_per_second", "Tokens, or samples, through its blocks", seen.tokens_per_second)
    took = SummaryMetricFamily(
        f"{PREFIX}microbatch_duration_seconds", "Of one, at its blocks", labels=("phase",)
    )
    coded = SummaryMetricFamily(
        f"{PREFIX}bundle_coding_duration_seconds", "To write or read one", labels=("way",)
    )
    for family, whats in ((took, ("forward", "backward")), (coded, ("encode", "decode"))):
        for what in whats:
            family.add_metric((what,), seen.done.get(what, 0), seen.spent.get(what, 0.0))
        yield family
    yield _counters("worker_seconds", "What its worker did, or waited for", ("activity",), seen.occupied)
    yield _gauge("pipeline_bubble_ratio", "Of the last minute, that it waited for data or room", seen.bubble)
    yield _counter(
        "bundle_transmit_bytes", "Activations and gradients sent, as they were written", seen.sent_bytes
    )
    yield _counter("bundle_raw_bytes", "The same as they lie in memory", seen.raw_bytes)
    trips = {"median": median(seen.trips), "slowest": max(seen.trips)} if seen.trips else {}
    yield _gauges("peer_rtt_seconds", "There and back, over its links", ("link",), trips)
    yield _gauge("memory_limit_bytes", "Memory that it offers, of its GPU if it has one", seen.memory_limit)
    yield _gauge("main_memory_limit_bytes", "Main memory that it offers beside a GPU", seen.main_memory_limit)
    yield _gauge("credit", "Its tokens, or samples, times blocks in the result", seen.credit)


def reliable_metrics(seen: ReliableFigures) -> Iterator[Metric]:
    """Metrics of a reliable peer."""
    yield _gauge("leading", "Whether it leads the log, and so coordinates", seen.leading)
    yield _gauge("reliable_peers", "Members of the log", seen.members)
    yield _gauge("step", "Steps, or batches, that are committed", seen.done)
    yield _gauge("steps_planned", "Of the whole run", seen.steps)
    yield _gauge("loss", "Of the last committed step", seen.loss)
    yield _gauge("gradient_norm", "Of the last committed step, before clipping", seen.gradient_norm)
    yield _gauge("learning_rate", "Of the last committed step", seen.learning_rate)
    yield _gauge("checkpoint_step", "Updates in the newest checkpoint on its disk", seen.stored)
    yield _gauge("best_checkpoint_step", "Updates in the checkpoint of the lowest held-out loss", seen.best)
    yield _gauge("credit", "Tokens, or samples, times blocks in the result, of all peers", seen.credit)
    yield _gauge("contributors", "Peers that have some", seen.contributors)
    if (swarm := seen.swarm) is not None:
        peers = {"connected": swarm.volunteers, "working": swarm.working}
        yield _gauges("swarm_peers", "Volunteers that the coordinator has", ("state",), peers)
        holders = {str(block): count for block, count in sorted(swarm.holders.items())}
        yield _gauges("swarm_block_replicas", "Peers with a block's current state", ("block",), holders)
        yield _gauge(
            "swarm_tokens_per_second", "Tokens, or samples, of the last step", swarm.tokens_per_second
        )


class LogMetrics:
    """Metrics of the log's records, added in order: number, duration of steps, newest held-out loss."""

    def __init__(self, norms: Callable[[Mapping[str, Any]], Mapping[str, float]]) -> None:
        """`norms`: record of a commit → group of parameters → norm of its gradient."""
        self._norms = norms
        self._group_norms: Mapping[str, float] = {}
        self._block_norms: Mapping[str, float] = {}
        self._heldout_loss: float | None = None
        self._heldout_accuracy: float | None = None
        self._kinds = dict.fromkeys((*KINDS, OTHER), 0)
        self._steps = _histogram("step_duration_seconds", "From a step's turn to its commit")
        self._averagings = _histogram(
            "averaging_duration_seconds",
            "From the plan to the decision, of a step's gradient or of parameters",
            "of",
        )

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one more record."""
        kind = record["kind"]
        self._kinds[kind if kind in self._kinds else OTHER] += 1
        if kind == "commit":
            squares = enumerate(record.get("squares", ()))
            self._block_norms = {str(block): math.sqrt(square) for block, square in squares}
            self._group_norms = self._norms(record)
        if kind == "commit" and "reduce_seconds" in record:
            self._steps.observe(record["seconds"])
            self._averagings.labels("gradient").observe(record["reduce_seconds"])
        if kind == "evaluation":
            self._heldout_loss = record["loss"]
            right, counted = record.get("hits", (0, 0))
            self._heldout_accuracy = right / counted if counted else None
        if kind == "average":
            self._averagings.labels("parameters").observe(record["seconds"])

    def metrics(self) -> Iterator[Metric]:
        """Metrics of all records added."""
        yield _counters("log_records", "Decisions in the log", ("kind",), self._kinds)
        what = "Of the last committed step, before clipping"
        yield _gauges("block_gradient_norm", what, ("block",), self._block_norms)
        yield _gauges("group_gradient_norm", what, ("group",), self._group_norms)
        yield _gauge("heldout_loss", "Of the newest evaluation", self._heldout_loss)
        yield _gauge("heldout_accuracy", "Of the newest evaluation, 0 to 1", self._heldout_accuracy)
        yield from self._steps.collect()
        yield from self._averagings.collect()


def _histogram(name: str, what: str, *labels: str) -> Histogram:
    return Histogram(PREFIX + name, what, labels, buckets=SECONDS, registry=None)


def _gauge(name: str, what: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, what)
    if value is not None:
        family.add_metric((), value)
    return family


def _limit(name: str, what: str, value: float) -> Metric:
    """A gauge; without a sample if `value` is None."""
    return _gauge(name, what, value if value and math.isfinite(value) else None)


def _gauges(name: str, what: str, labels: tuple[str], values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, what, labels=labels)
    for label, value in values.items():
        family.add_metric((label,), value)
    return family


def _counter(name: str, what: str, value: float) -> Metric:
    family = CounterMetricFamily(PREFIX + name, what)
    family.add_metric((), value)
    return family


def _counters(name: str, what: str, labels: tuple[str], values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, what, labels=labels)
    for label, value in values.items():
        family.add_metric((label,), value)
    return family
