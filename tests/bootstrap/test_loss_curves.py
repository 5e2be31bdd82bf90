"""A run's loss curves from its log, thin enough to be sent."""

from itertools import pairwise

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.bootstrap.log.credit import Credit
from hetpeer.bootstrap.log.loss_curves import (
    MAX_BYTES,
    MAX_POINTS,
    Curve,
    Curves,
    GroupedCurves,
    LogCurves,
    thinned,
)
from hetpeer.dht.base.errors import ProtocolError


def commit(step: int, loss: float) -> dict[str, object]:
    return {"kind": "commit", "step": step, "batch": step, "loss": loss}


def evaluation(step: int, loss: float) -> dict[str, object]:
    return {"kind": "evaluation", "step": step, "batch": step, "loss": loss}


def folded(*records: dict[str, object]) -> LogCurves:
    curves = LogCurves()
    for record in records:
        curves.add(record)
    return curves


def test_the_log_is_folded() -> None:
    log = folded(evaluation(0, 5.0), commit(0, 4.5), {"kind": "reign", "term": 2}, commit(1, 4.0))
    assert log.curves == Curves(training=((1, 4.5), (2, 4.0)), evaluation=((0, 5.0),))


def test_what_a_roll_back_voids_is_not_shown() -> None:
    log = folded(commit(0, 4.5), commit(1, 4.0), evaluation(2, 3.9), {"kind": "rollback", "to_version": 1})
    assert log.curves == Curves(training=((1, 4.5),))
    log.add(commit(1, 4.1))
    assert log.curves.training == ((1, 4.5), (2, 4.1))


def test_of_a_grouped_run_only_what_is_in_the_result_is_shown() -> None:
    """Clusters commit out of order, and what is lost with one is trained again: with another loss."""
    credit = Credit(grouped=8)
    curves = GroupedCurves(lambda: credit.counting)

    def happens(*records: dict[str, object]) -> Curves:
        for record in records:
            credit.add(record)
            curves.add(record)
        return curves.curves

    def of(cluster: int, step: int, batch: int, loss: float) -> dict[str, object]:
        return {"kind": "commit", "cluster": cluster, "step": step, "batch": batch, "loss": loss}

    founded = [{"kind": "founded", "cluster": cluster, "version": 0} for cluster in (0, 1)]
    shown = happens(*founded, of(1, 0, 1, 4.8), of(0, 0, 0, 5.0), of(1, 1, 2, 4.5), evaluation(0, 5.5))
    assert shown == Curves(training=((1, 5.0), (2, 4.8), (3, 4.5)), evaluation=((0, 5.5),))
    assert happens({"kind": "dissolved", "cluster": 1}).training == ((1, 5.0),)
    shown = happens(of(0, 1, 1, 4.9), of(0, 2, 2, 4.7), evaluation(0, 5.4))
    assert shown == Curves(training=((1, 5.0), (2, 4.9), (3, 4.7)), evaluation=((0, 5.4),))


@pytest.mark.parametrize("count", [0, 1, 2, MAX_POINTS - 1, MAX_POINTS, MAX_POINTS + 1, 10 * MAX_POINTS + 3])
def test_points_are_thinned_evenly_and_the_last_one_is_kept(count: int) -> None:
    points = thinned((float(x), -float(x)) for x in reversed(range(count)))
    assert len(points) <= MAX_POINTS
    assert points[:1] == ((0.0, 0.0),)[:count]
    assert points[-1:] == ((count - 1.0, 1.0 - count),)[:count]
    assert len({b[0] - a[0] for a, b in pairwise(points[:-1])}) <= 1


@given(st.integers(1, 5 * MAX_POINTS), st.integers(1, 7))
def test_a_curve_keeps_its_shape_and_its_end(count: int, stride: int) -> None:
    curve = Curve()
    for x in range(0, count * stride, stride):
        curve.add(x, -x)
    points = curve.points
    assert len(points) <= MAX_POINTS
    assert points == sorted(points)
    assert points[0] == (0, 0)
    assert points[-1] == ((count - 1) * stride, -(count - 1) * stride)
    gaps = [b[0] - a[0] for a, b in pairwise(points[:-1])]
    assert len(set(gaps)) <= 1  # evenly thinned


def test_what_is_not_behind_is_not_taken() -> None:
    curve = Curve()
    for x in (1, 2, 2, 1, 3):
        curve.add(x, float(x))
    assert curve.points == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_they_arrive_as_they_were_sent() -> None:
    log = folded(*(commit(step, 1 / (step + 1)) for step in range(5000)), evaluation(0, 5.0))
    data = log.curves.encode()
    assert len(data) <= MAX_BYTES
    assert Curves.decode(data, "peer") == log.curves


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb({"training": [[1]]}),
        msgpack.packb({"training": [[1, "2"]]}),
        msgpack.packb({"training": [[1, float("nan")]]}),
        msgpack.packb({"training": [[1, 2]] * (MAX_POINTS + 1)}),
        Curves(training=((1, 2.0),)).encode()[:-1],
    ],
)
def test_an_answer_that_is_none_is_refused(answer: bytes) -> None:
    with pytest.raises(ProtocolError):
        Curves.decode(answer, "peer")
