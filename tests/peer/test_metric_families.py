"""The names, labels and units of all metrics; that the docs, the dashboard and the alerts use those, and
no others.
"""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from hetpeer.peer.limits.nvml import GpuLoad, GpuState
from hetpeer.peer.watching.metric_families import (
    KINDS,
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

DOCS = Path(__file__).parents[2] / "docs"
DAEMON = DaemonFigures(
    version="0.1",
    role="volunteer",
    run="tiny",
    state="training",
    states=("starting", "training"),
    started=1e9,
    resident={"daemon": 100, "worker": 200},
    cpu={"daemon": 1.5, "worker": 2.5},
    memory_available=1 << 30,
    disk_free=1 << 40,
    reach="private",
    relays=2,
    p2pd_restarts=1,
    dht_refused=3,
    transmitted=5000,
    received=7000,
    warnings=frozenset({"HP-NET-015"}),
    warned_of=("HP-DISK-004", "HP-NET-015"),
)
VOLUNTEER = VolunteerMetricFigures(
    connected=True,
    step=7,
    loss=2.5,
    blocks=3,
    microbatches=12,
    tokens_per_second=64.0,
    done={"forward": 12, "backward": 11},
    spent={"forward": 1.2, "backward": 2.2},
    occupied={"computes": 3.0, "data": 1.0, "room": 0.5, "step": 0.25},
    bubble=0.3,
    raw_bytes=4000,
    sent_bytes=1000,
    trips=(0.01, 0.02, 0.3),
    memory_limit=1 << 30,
    main_memory_limit=1 << 31,
    credit=1536,
)
LIMITS = LimitFigures(
    transmit_rate=2.5e6,
    receive_rate=1e6,
    transfer_cap=3e11,
    month_bytes=12_000,
    cores=2,
    celsius={"gpu": 83, "cpu": 0},
    gpu_watts=200,
    holding=frozenset({"battery"}),
    reasons=("user", "battery"),
)
GPU = GpuState(
    number=1,
    load=GpuLoad(name="A10", busy=0.5, memory_used=3 << 30, memory_total=24 << 30),
    celsius=64.0,
    watts=120.5,
)
RELIABLE = ReliableFigures(
    leading=True,
    members=3,
    done=7,
    steps=60,
    loss=2.5,
    gradient_norm=0.75,
    learning_rate=5e-4,
    stored=5,
    best=3,
    credit=4096,
    contributors=2,
    swarm=SwarmFigures(volunteers=3, working=2, tokens_per_second=128.0, holders={0: 1, 1: 2}),
)
RECORDS = [
    {"kind": "commit", "step": 0, "seconds": 2.0, "reduce_seconds": 0.4},
    {"kind": "commit", "step": 1, "seconds": 50.0, "reduce_seconds": 4.0, "squares": [4.0, 9.0]},
    {"kind": "average", "seconds": 7.0},
    {"kind": "evaluation", "loss": 3.5},
    {"kind": "evaluation", "loss": 3.25, "hits": [1, 4]},
    {"kind": "rollback"},
    {"kind": "of a later version"},
]


def log_metrics(*records):
    log = LogMetrics(lambda record: {"*.bias": record["step"] + 0.5, "others": 2.0})
    for record in records:
        log.add(record)
    return list(log.metrics())


def of_a_volunteer():
    return [
        *daemon_metrics(DAEMON),
        *limit_metrics(LIMITS),
        *gpu_metrics([GPU], 20 << 30),
        *volunteer_metrics(VOLUNTEER),
    ]


def of_a_reliable_peer():
    return [*daemon_metrics(DAEMON), *reliable_metrics(RELIABLE), *log_metrics(*RECORDS)]


def everything():
    return [*of_a_volunteer(), *of_a_reliable_peer()]


def samples(families):
    return {
        (one.name, *one.labels.values()): one.value
        for family in families
        for one in family.samples
        if not one.name.endswith("_created")
    }


def series():
    return {name for name, *_ in samples(everything())}


def test_figures_become_samples():
    found = samples(everything())
    assert found["hetpeer_build_info", "0.1", "volunteer", "tiny"] == 1
    assert (found["hetpeer_state", "training"], found["hetpeer_state", "starting"]) == (1, 0)
    assert found["hetpeer_process_resident_memory_bytes", "worker"] == 200
    assert (found["hetpeer_reachable", "private"], found["hetpeer_reachable", "public"]) == (1, 0)
    assert found["hetpeer_microbatch_duration_seconds_sum", "backward"] == 2.2
    assert found["hetpeer_bundle_coding_duration_seconds_count", "decode"] == 0
    assert found["hetpeer_worker_seconds_total", "room"] == 0.5
    assert found["hetpeer_peer_rtt_seconds", "median"] == 0.02
    assert found["hetpeer_peer_rtt_seconds", "slowest"] == 0.3
    assert found["hetpeer_swarm_block_replicas", "1"] == 2
    assert (found["hetpeer_gradient_norm",], found["hetpeer_learning_rate",]) == (0.75, 5e-4)
    assert (found["hetpeer_checkpoint_step",], found["hetpeer_best_checkpoint_step",]) == (5, 3)
    assert (found["hetpeer_block_gradient_norm", "0"], found["hetpeer_block_gradient_norm", "1"]) == (2, 3)
    assert found["hetpeer_group_gradient_norm", "*.bias"] == 1.5
    assert found["hetpeer_group_gradient_norm", "others"] == 2
    assert found["hetpeer_heldout_loss",] == 3.25
    assert found["hetpeer_heldout_accuracy",] == 0.25
    assert found["hetpeer_swarm_peers", "working"] == 2
    assert found["hetpeer_network_transmit_bytes_total",] == 5000
    assert (found["hetpeer_warning", "HP-NET-015"], found["hetpeer_warning", "HP-DISK-004"]) == (1, 0)
    assert found["hetpeer_network_transmit_limit_bytes_per_second",] == 2.5e6
    assert found["hetpeer_temperature_limit_celsius", "gpu"] == 83
    assert (found["hetpeer_held", "battery"], found["hetpeer_held", "user"]) == (1, 0)
    assert found["hetpeer_gpu_info", "1", "A10"] == 1
    assert found["hetpeer_gpu_memory_used_bytes", "1"] == 3 << 30
    assert found["hetpeer_gpu_memory_limit_bytes", "1"] == 20 << 30
    assert (found["hetpeer_gpu_temperature_celsius", "1"], found["hetpeer_gpu_power_watts", "1"]) == (
        64,
        120.5,
    )


def test_the_log_is_counted_and_timed():
    found = samples(log_metrics(*RECORDS))
    assert found["hetpeer_log_records_total", "commit"] == 2
    assert found["hetpeer_log_records_total", "other"] == 1
    assert found["hetpeer_step_duration_seconds_bucket", "3.0"] == 1
    assert found["hetpeer_step_duration_seconds_sum",] == 52.0
    assert found["hetpeer_averaging_duration_seconds_count", "gradient"] == 2
    assert found["hetpeer_averaging_duration_seconds_sum", "parameters"] == 7.0


def test_what_is_not_known_has_no_sample():
    nothing = VolunteerMetricFigures(
        **{name: getattr(VOLUNTEER, name) for name in VOLUNTEER.__slots__}
        | {"step": None, "loss": None, "trips": (), "credit": None}
    )
    found = {name for name, *_ in samples(volunteer_metrics(nothing))}
    gone = {name for name, *_ in samples(volunteer_metrics(VOLUNTEER))} - found
    assert gone == {"hetpeer_step", "hetpeer_loss", "hetpeer_peer_rtt_seconds", "hetpeer_credit"}
    silent = replace(GPU, celsius=None, watts=None)
    gone = {name for name, *_ in samples(gpu_metrics([GPU], 1))} - {
        name for name, *_ in samples(gpu_metrics([silent], None))
    }
    assert gone == {
        f"hetpeer_gpu_{what}" for what in ("temperature_celsius", "power_watts", "memory_limit_bytes")
    }
    assert samples(gpu_metrics([], None)) == {}


def test_what_is_not_limited_has_no_limit():
    free = replace(
        LIMITS,
        transmit_rate=math.inf,
        receive_rate=math.inf,
        transfer_cap=math.inf,
        cores=0,
        celsius={"gpu": 0, "cpu": 0},
        gpu_watts=0,
    )
    assert {name for name, *_ in samples(limit_metrics(free))} == {
        "hetpeer_transfer_month_bytes",
        "hetpeer_held",
    }


def test_labels_are_few():
    """Whatever the daemon does: a name from outside never becomes one."""
    labels = {label for family in everything() for one in family.samples for label in one.labels}
    words = (
        "version role run state process via phase way activity link kind le of block group code reason gpu"
    )
    assert labels == {*words.split(), "model"}
    kinds = {labels[0] for name, *labels in samples(log_metrics(*RECORDS)) if name.endswith("records_total")}
    assert kinds == {*KINDS, "other"}


class Daemon(Collector):
    """A daemon with these metrics."""

    def __init__(self, families):
        self._families = families

    def collect(self):
        return self._families


def exposition(families, accept=""):
    """A daemon's metrics as a scraper gets them, and their content type."""
    registry = CollectorRegistry()
    registry.register(Daemon(families))
    encode, content_type = choose_encoder(accept)
    return encode(registry).decode(), content_type


UNITS = {"seconds", "bytes", "celsius", "joules", "grams", "meters", "volts", "amperes", "kelvin"}
"""Prometheus's base units."""
OTHER_UNITS = "minutes hours days weeks fahrenheit rankine inches yards miles bits calories pounds ounces"
PREFIXES = "pico nano micro milli centi deci deca hecto kilo kibi mega mibi giga gibi tera tebi peta pebi"
SHORT = "s ms us ns sec b kb mb gb tb pb m h d"
TYPES = "counter gauge summary histogram gauge_histogram"


def complaints(family):
    """Complaints of `promtool check metrics` about a family: the rules of Prometheus's linter."""
    name, kind = family.name + ("_total" if family.type == "counter" else ""), family.type
    words, around = name.split("_"), f"_{name}_"
    if not family.documentation:
        yield "no help text"
    if kind != "counter" and name.endswith("_total"):
        yield "_total of what is no counter"
    if kind != "histogram" and name.endswith("_bucket"):
        yield "_bucket of what is no histogram"
    if kind not in ("histogram", "summary") and name.endswith(("_count", "_sum")):
        yield "_count or _sum of what is neither histogram nor summary"
    if ":" in name or re.search("[a-z][A-Z]", name):
        yield "a colon, or camelCase"
    if any(f"_{one}_" in around for one in (*TYPES.split(), *SHORT.split())):
        yield "a type or an abbreviated unit in the name"
    if any(word in OTHER_UNITS.split() for word in words):
        yield "not the base unit"
    if any(word == prefix + unit for word in words for prefix in PREFIXES.split() for unit in UNITS):
        yield "a unit with a prefix"
    for label in {label for one in family.samples for label in one.labels}:
        if re.search("[a-z][A-Z]", label):
            yield f"camelCase in the label {label}"
        if (label == "le" and kind != "histogram") or (label == "quantile" and kind != "summary"):
            yield f"the label {label}, which Prometheus keeps for distributions"


@pytest.mark.parametrize("metrics", [of_a_volunteer, of_a_reliable_peer])
def test_prometheus_has_nothing_to_say(metrics):
    """As `promtool check metrics`, which is asked, too, where it is installed."""
    text, _ = exposition(metrics())
    families = [*text_string_to_metric_families(text)]
    assert "hetpeer_loss" in {family.name for family in families}
    assert [(family.name, said) for family in families for said in complaints(family)] == []
    opened, content_type = exposition(metrics(), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert [*open_metrics(opened)]
    if (promtool := shutil.which("promtool")) is not None:
        command = [promtool, "check", "metrics"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("family", "said"),
    [
        (GaugeMetricFamily("a_total", "b"), "_total"),
        (GaugeMetricFamily("a", ""), "no help"),
        (GaugeMetricFamily("a_milliseconds", "b"), "prefix"),
        (GaugeMetricFamily("a_minutes", "b"), "base unit"),
        (GaugeMetricFamily("a_ms", "b"), "abbreviated"),
        (GaugeMetricFamily("gauge_of_a_gauge", "b"), "type"),
        (GaugeMetricFamily("a_count", "b"), "_count"),
    ],
)
def test_the_linter_speaks(family, said):
    assert any(said in one for one in complaints(family))


def test_the_docs_name_all_of_them_and_no_others():
    named = set()
    for row in re.findall(r"^\| (`hetpeer_.*?) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE):
        first, *further = re.findall(r"`(\w+)`", row)
        stem = re.sub(r"_(count|sum|bucket)$", "", first)
        named |= {first, *(stem + suffix for suffix in further)}
    assert named == series()


def queries():
    for panel in json.loads((DOCS / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for group in yaml.safe_load((DOCS / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(("where", "query"), [*queries()])
def test_dashboard_and_alerts_ask_for_what_there_is(where, query):
    asked = set(re.findall(r"\bhetpeer_\w+", query))
    assert asked
    assert asked <= series()
    for kinds in re.findall(r'kind=~?"([^"]*)"', query):
        assert set(kinds.split("|")) <= set(KINDS)


def test_there_are_six_alerts():
    (group,) = yaml.safe_load((DOCS / "alerts.yaml").read_text())["groups"]
    assert len(group["rules"]) == 6
    assert all({"alert", "expr", "labels", "annotations"} <= rule.keys() for rule in group["rules"])
