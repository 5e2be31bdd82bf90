"""The network as arithmetic: when a packet comes out, and whether."""

import json

import pytest

from tests.wanlab.lab import MATRICES
from tests.wanlab.matrix import Matrix, MatrixError
from tests.wanlab.network import Network

TCP = 6


def network(**data):
    return Network(Matrix.of({"nodes": 3, **data}))


def arrivals(net, until=1e9):
    """(seconds, node, packet) in the order of arrival."""
    found = []
    while (due := net.next_due) is not None and due <= until:
        found += [(due, node, packet) for node, packet in net.due(due)]
    return found


def flow(source, to):
    return TCP, source.to_bytes(2, "big") + to.to_bytes(2, "big")


def test_latency_alone():
    net = network(latency_ms=[[0, 10, 20], [5, 0, 0], [0, 0, 0]])
    net.send(1.0, 0, 1, 1500, "there")
    net.send(1.0, 1, 0, 1500, "back")
    assert arrivals(net) == [(1.005, 0, "back"), (1.01, 1, "there")]


def test_a_pairs_rate_is_its_own_and_an_uplink_is_shared():
    net = network(bandwidth_mbps=8, queue_ms=1e6)  # a byte takes a microsecond
    for name in "ab":
        net.send(0.0, 0, 1, 1000, name)
        net.send(0.0, 0, 2, 1000, name)
    assert [(round(t, 6), node) for t, node, _ in arrivals(net)] == [
        (0.001, 1),
        (0.001, 2),
        (0.002, 1),
        (0.002, 2),
    ]
    net = network(uplink_mbps=8, queue_ms=1e6)
    net.send(0.0, 0, 1, 1000, "a")
    net.send(0.0, 0, 2, 1000, "b")
    assert [(round(t, 6), node) for t, node, _ in arrivals(net)] == [(0.001, 1), (0.002, 2)]


def test_lines_are_directed():
    net = network(uplink_mbps=[8, 80, 0], downlink_mbps=[0, 0, 8], queue_ms=1e6)
    net.send(0.0, 0, 1, 1000, "slow up")
    net.send(0.0, 1, 0, 1000, "fast up")
    net.send(0.0, 1, 2, 1000, "slow down")
    times = {packet: round(t, 6) for t, _, packet in arrivals(net)}
    assert times == {"slow up": 0.001, "fast up": 0.0001, "slow down": 0.0012}


def test_a_full_queue_drops():
    net = network(uplink_mbps=8, queue_ms=5)
    for number in range(10):
        net.send(0.0, 0, 1, 1000, number)
    assert [packet for *_, packet in arrivals(net)] == [0, 1, 2, 3, 4, 5]
    assert net.counters.queue_drops == 4
    assert net.pair_bytes[0][1] == 10_000


def test_loss_is_by_chance_of_the_seed():
    lost = []
    for seed in (1, 1, 2):
        net = Network(Matrix.of({"nodes": 2, "loss": 0.1}), seed)
        for number in range(1000):
            net.send(float(number), 0, 1, 100, number)
        assert 60 < net.counters.loss_drops < 140
        lost.append(frozenset(range(1000)) - {packet for *_, packet in arrivals(net)})
    assert lost[0] == lost[1] != lost[2]


def test_closed_nodes_take_answers_only():
    net = network(no_inbound=["n2"])
    net.send(0.0, 0, 2, 100, "uninvited", flow(4000, 5000))
    net.send(0.0, 2, 0, 100, "request", flow(5000, 4000))
    net.send(0.1, 0, 2, 100, "answer", flow(4000, 5000))
    net.send(0.1, 0, 2, 100, "other port", flow(4001, 5000))
    net.send(0.1, 1, 2, 100, "other node", flow(4000, 5000))
    net.send(0.1, 0, 2, 100, "no ports", None)
    net.send(0.1, 2, 1, 100, "no ports either", None)
    assert {packet for *_, packet in arrivals(net)} == {"request", "answer", "no ports either"}
    assert net.counters.refused == 4
    net.obey("open 2")
    net.send(0.2, 1, 2, 100, "now", None)
    assert [packet for *_, packet in arrivals(net)] == ["now"]


def test_orders_change_the_network():
    net = network(latency_ms=1)
    net.obey("partition n1")
    net.send(0.0, 0, 1, 100, "cut")
    net.send(0.0, 1, 2, 100, "cut")
    net.obey("heal 1")
    net.obey("cut 0 2")
    net.send(0.0, 2, 0, 100, "cut")
    net.obey("mend 0 2")
    net.obey("latency 0 1 50")
    net.obey("uplink 0 8")
    net.send(0.0, 0, 1, 1000, "late")
    net.send(0.0, 1, 0, 1000, "late too")
    assert [(round(t, 6), packet) for t, _, packet in arrivals(net)] == [(0.05, "late too"), (0.051, "late")]
    assert net.counters.cut_drops == 3
    net.obey("loss 1")
    net.send(0.0, 0, 1, 100, "lost")
    assert not arrivals(net)
    for wrong in ("", "cut 0", "partition n7", "latency 0 1 fast", "explode 1"):
        with pytest.raises(ValueError):
            net.obey(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"nodes": 0},
        {"nodes": 1000},
        {"names": ["a", "a"]},
        {"nodes": 2, "latency_ms": [[0, 1]]},
        {"nodes": 2, "latency_ms": -1},
        {"nodes": 2, "uplink_mbps": [1, 2, 3]},
        {"nodes": 2, "uplink_mbps": "fast"},
        {"nodes": 2, "no_inbound": ["stranger"]},
        {"nodes": 2, "latencies": 1},
    ],
)
def test_a_wrong_matrix_is_refused(wrong):
    with pytest.raises(MatrixError):
        Matrix.of(wrong)


@pytest.mark.parametrize("path", sorted(MATRICES.glob("*.json")), ids=lambda path: path.stem)
def test_our_matrices_are_networks(path):
    matrix = Matrix.load(path)
    assert len(matrix) >= 5
    assert json.loads(path.read_text())["names"] == list(matrix.names)
