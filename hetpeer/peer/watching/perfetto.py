"""Traces of a swarm in the format of trace viewers (ui.perfetto.dev, chrome://tracing).

Trace Event Format, "JSON Object Format": complete events ("X"), times in microseconds, one process for each
peer, one thread for each lane.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.process.span_trace import SUFFIX

ORDER = ("step", "compute", "waits", "send", "receive")
"""Lanes that are shown first."""

Line = dict[str, Any]


def perfetto(folder: Path) -> dict[str, Any]:
    """All traces below `folder`. Raises `LocalError` HP-TRACE-001 (there is none), HP-TRACE-002 (damaged)."""
    paths = sorted(folder.rglob(f"*{SUFFIX}"))
    if not paths:
        raise LocalError(
            "HP-TRACE-001",
            f"no traces in {folder}",
            why=f"no file *{SUFFIX} lies there",
            fix="run `hetpeer join --trace` or `hetpeer demo --trace`, and give that folder",
            exit_code=ExitCode.USAGE,
        )
    files = [lines for lines in map(_lines, paths) if lines]
    # A span is written when it ends: the first line is not what began first.
    start = min((head["wall"] + span["from"] for head, *spans in files for span in spans), default=0.0)
    events = [
        event
        for number, (head, *spans) in enumerate(files, 1)
        for event in _events(number, head, spans, start)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"peers": len(files)}}


def _events(process: int, head: Line, spans: list[Line], start: float) -> Iterator[Line]:
    """Events of one peer; `start` is the wall time of the swarm's first span."""
    lanes = sorted({span["lane"] for span in spans}, key=_place)
    yield _name("process_name", process, 0, head.get("name") or head.get("peer", "")[-6:])
    for thread, lane in enumerate(lanes, 1):
        yield _name("thread_name", process, thread, lane)
        yield {**_name("thread_sort_index", process, thread, lane), "args": {"sort_index": thread}}
    for span in spans:
        known = ("lane", "name", "from", "to")
        yield {
            "ph": "X",
            "pid": process,
            "tid": lanes.index(span["lane"]) + 1,
            "name": span["name"],
            "cat": span["lane"].split()[0],
            "ts": round((head["wall"] + span["from"] - start) * 1e6, 1),
            "dur": round((span["to"] - span["from"]) * 1e6, 1),
            "args": {key: value for key, value in span.items() if key not in known},
        }


def _name(kind: str, process: int, thread: int, name: str) -> Line:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _place(lane: str) -> tuple[int, str]:
    return (ORDER.index(lane) if lane in ORDER else len(ORDER), lane)


def _lines(path: Path) -> list[Line]:
    """Head and spans of the trace at `path`. A torn last line, of a killed process, is left out."""
    try:
        with path.open() as file:
            texts = [text for text in file if text.endswith("\n")]
    except UnicodeDecodeError as error:
        raise _damaged(path, "it is not text") from error
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error
    return [_line(path, number, text) for number, text in enumerate(texts)]


def _line(path: Path, number: int, text: str) -> Line:
    """Line `number` of a trace; line 0 is the head. Raises an error if it is damaged."""
    try:
        line: Line = json.loads(text)
        missing = ({"lane", "name", "from", "to"} if number else {"wall"}) - line.keys()
        why = f"{min(missing)} is missing" if missing else ""
    except (ValueError, AttributeError) as error:
        why = str(error)
    if not why:
        return line
    raise _damaged(path, f"line {number + 1}: {why}")


def _damaged(path: Path, why: str) -> LocalError:
    return LocalError(
        "HP-TRACE-002",
        f"{path} is damaged",
        why=why,
        fix="remove that file and run the command again",
        exit_code=ExitCode.USAGE,
    )
