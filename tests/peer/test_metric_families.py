"""The names, labels and units of all metrics; that the docs, the dashboard and the alerts use those, and
no others.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

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
    stored=5,
    credit=4096,
    contributors=2,
    swarm=SwarmFigures(volunteers=3, working=2, tokens_per_second=128.0, holders={0: 1, 1: 2}),
)
RECORDS = [
    {"kind": "commit", "step": 0, "seconds": 2.0, "reduce_seconds": 0.4},
    {"kind": "commit", "step": 1, "seconds": 50.0, "reduce_seconds": 4.0},
    {"kind": "average", "seconds": 7.0},
    {"kind": "rollback"},
    {"kind": "of a later version"},
]


def log_metrics(*records):
    log = LogMetrics()
    for record in records:
        log.add(record)
    return list(log.metrics())


def everything():
    return [
        *daemon_metrics(DAEMON),
        *limit_metrics(LIMITS),
        *gpu_metrics([GPU], 20 << 30),
        *volunteer_metrics(VOLUNTEER),
        *reliable_metrics(RELIABLE),
        *log_metrics(*RECORDS),
    ]


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
    words = "version role run state process via phase way activity link kind le of block code reason gpu"
    assert labels == {*words.split(), "model"}
    kinds = {labels[0] for name, *labels in samples(log_metrics(*RECORDS)) if name.endswith("records_total")}
    assert kinds == {*KINDS, "other"}


def test_labels_that_prometheus_keeps_for_distributions_are_on_these_alone():
    """`promtool check metrics` complains of others."""
    kept = {"summary": {"quantile"}, "histogram": {"le"}}
    for family in everything():
        labels = {label for one in family.samples for label in one.labels}
        assert labels & {"quantile", "le"} <= kept.get(family.type, set()), family.name


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
