"""Traces: spans on disk, and the picture of several peers."""

import json

import pytest
from typer.testing import CliRunner

from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.cli.main import app
from hetpeer.peer.process import span_trace
from hetpeer.peer.process.span_trace import Trace
from hetpeer.peer.watching.perfetto import perfetto


class At:
    """A clock whose wall is far from its monotonic time."""

    def __init__(self, wall=0.0):
        self.time, self._offset = 0.0, wall

    def monotonic(self):
        return self.time

    def wall(self):
        return self.time + self._offset


def test_two_peers_meet_on_the_wall_clock(tmp_path):
    """The second one's machine was started 40 s later, so its own clock is 40 s behind."""
    for name, wall, begins in (("a", 1000.0, 50.0), ("b", 1040.0, 11.0)):
        clock = At(wall)
        trace = Trace(clock, tmp_path / name / "runs" / f"1{span_trace.SUFFIX}", peer=f"Qm{name}", name=name)
        clock.time = begins + 2
        trace.span("to Qmxyz", "activation 3", begins, begins + 0.5, bytes=7)
        trace.span("compute", "Forward 3/0", begins)
        trace.close()
        trace.span("compute", "too late", begins)
    done = CliRunner().invoke(app, ["trace", str(tmp_path), "--out", str(tmp_path / "t.json")])
    assert done.exit_code == 0, done.output
    assert "4 spans of 2 peers" in done.output
    picture = json.loads((tmp_path / "t.json").read_text())
    spans = [event for event in picture["traceEvents"] if event["ph"] == "X"]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in picture["traceEvents"] if e["name"] == "thread_name"
    }
    found = {(e["pid"], names[e["pid"], e["tid"]], e["name"]): (e["ts"], e["dur"]) for e in spans}
    assert found == {
        (1, "to Qmxyz", "activation 3"): (0.0, 0.5e6),
        (1, "compute", "Forward 3/0"): (0.0, 2e6),
        (2, "to Qmxyz", "activation 3"): (1e6, 0.5e6),
        (2, "compute", "Forward 3/0"): (1e6, 2e6),
    }
    assert spans[0]["args"] == {"bytes": 7}
    assert names[1, 1] == "compute"
    assert {e["args"]["name"] for e in picture["traceEvents"] if e["name"] == "process_name"} == {"a", "b"}


def test_no_span_begins_before_the_picture_does(tmp_path):
    """A step is written when it ends, after all that happened in it; viewers drop what has a negative
    time.
    """
    clock = At(1000.0)
    trace = Trace(clock, tmp_path / f"1{span_trace.SUFFIX}", name="a")
    clock.time = 9.0
    trace.span("compute", "Forward 3/0", 7.0, 8.0)
    trace.span("step", "step 0", 2.0)
    trace.close()
    spans = {e["name"]: e["ts"] for e in perfetto(tmp_path)["traceEvents"] if e["ph"] == "X"}
    assert spans == {"step 0": 0.0, "Forward 3/0": 5e6}


def test_without_a_path_nothing_is_kept(tmp_path):
    trace = Trace(At())
    trace.span("compute", "x", 0.0)
    assert not trace.on
    trace.close()


def test_a_torn_line_is_left_out_and_a_damaged_file_is_named(tmp_path):
    path = tmp_path / f"1{span_trace.SUFFIX}"
    trace = Trace(At(), path, name="a")
    trace.span("compute", "x", 0.0, 1.0)
    trace.close()
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    assert perfetto(tmp_path)["otherData"] == {"peers": 1}
    path.write_text(whole.replace('"from"', '"form"'))
    with pytest.raises(LocalError, match=r"HP-TRACE-002.*line 2: from is missing"):
        perfetto(tmp_path)
    path.write_text("[]\n")
    with pytest.raises(LocalError, match="HP-TRACE-002"):
        perfetto(tmp_path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(LocalError, match=r"HP-TRACE-002.*it is not text"):
        perfetto(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(LocalError, match=r"HP-TRACE-002.*Is a directory"):
        perfetto(tmp_path)


def test_no_traces_is_one_clear_line(tmp_path):
    with pytest.raises(LocalError, match=r"HP-TRACE-001.*--trace"):
        perfetto(tmp_path)


def test_a_trace_that_grows_too_large_or_cannot_be_written_ends(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(span_trace, "MAX_BYTES", 300)
    trace = Trace(At(), tmp_path / f"1{span_trace.SUFFIX}", name="a")
    for _ in range(10):
        trace.span("compute", "x", 0.0, 1.0)
    assert not trace.on
    assert "is full" in caplog.text
    assert (tmp_path / f"1{span_trace.SUFFIX}").stat().st_size <= 300
    full = Trace(At(), tmp_path / f"2{span_trace.SUFFIX}", name="a")
    full._file.close()
    full._file = open("/dev/full", "w", buffering=1)  # noqa: PTH123, SIM115
    full.span("compute", "x", 0.0, 1.0)
    assert not full.on
    assert "No space left" in caplog.text
