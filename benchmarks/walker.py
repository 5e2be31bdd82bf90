"""hetpeer with a notebook: the same command line, and each walk through the code that `benchmarks.walks`
counts.

`python -m benchmarks.walker join …` appends JSON lines to $HETPEER_HOME/walks.jsonl: the name of a walk, and
the file of every call of ours within it, in order. Landmarks are functions of the product, so one that is
renamed fails at import. A coroutine that goes on after an `await` counts as a call. Calls into other packages
are no part of a walk, nor are module and class bodies, lambdas, comprehensions and what a generator yields
after the first: a reader goes nowhere for those.
"""

from __future__ import annotations

import dis
import json
import os
import sys
from collections.abc import Callable
from inspect import CO_GENERATOR, CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hetpeer

MOST = 200
"""Walks of one name that are kept: later ones repeat them."""
RESUMED = 0b11
"""Bits of RESUME's argument that say what goes on: 0 a call, 1 and 2 a generator, 3 an `await`."""
ROOT = f"{Path(hetpeer.__path__[0])}/"
FORWARD, BACKWARD = "forward", "backward"
READY, JOIN = "ready", "join"


class Track:
    """One walk that is being written down; `calls` is None between two."""

    def __init__(self) -> None:
        self.calls: list[str] | None = None
        self.passed: set[str] = set()
        """Landmarks on the way to the end."""

    def begin(self, calls: list[str] | None = None) -> None:
        self.calls = [] if calls is None else calls
        self.passed = set()

    def drop(self) -> None:
        self.calls = None


class Walker:
    """A profile function (sys.setprofile) that appends finished walks to the file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tracks = {name: Track() for name in (FORWARD, BACKWARD, READY, JOIN)}
        self._answer, self._frame = Track(), Track()
        """An answer of the worker and a frame of a volunteer, until it is known what they are."""
        self._kept = dict.fromkeys(self._tracks, 0)
        self._files: dict[CodeType, str] = {}
        self._at_call: dict[CodeType, Callable[[FrameType], None]] = {}
        self._at_return: dict[CodeType, Callable[[FrameType, Any], None]] = {}
        self._tracks[JOIN].begin()

    def watch_daemon(self) -> None:
        """Set the landmarks; imports what has them, so call it once the command line has begun."""
        from hetpeer.averaging import messages as m
        from hetpeer.bootstrap.service import sessions
        from hetpeer.dht.streams.stream import Stream
        from hetpeer.peer.transport.tensor_receiver import TensorReceiver
        from hetpeer.stages.ipc import worker_messages, worker_process
        from hetpeer.stages.ipc.block_commands import Backward, Forward

        forward, backward, ready = (self._tracks[name] for name in (FORWARD, BACKWARD, READY))

        def arrived(frame: FrameType, _none: Any) -> None:
            if frame.f_back is not None and frame.f_back.f_code is TensorReceiver.frame.__code__:
                forward.begin()

        def answered(_frame: FrameType, result: Any) -> None:
            if isinstance(result, Backward.answer) and self._answer.calls is not None:
                backward.begin(self._answer.calls)
                if self._tracks[JOIN].calls:
                    self._finish(JOIN)
            self._answer.drop()

        def decoded(_frame: FrameType, message: Any) -> None:
            if isinstance(message, m.Ready) and self._frame.calls is not None:
                ready.begin(self._frame.calls)
            self._frame.drop()

        def posted(frame: FrameType, _answer: Any) -> None:
            command = frame.f_locals["command"]
            if isinstance(command, Forward) and forward.calls is not None:
                self._finish(FORWARD)
            if isinstance(command, Forward | Backward):
                pass_by("posted")

        def sent(frame: FrameType) -> None:
            head = frame.f_locals["header"].get("m")
            if isinstance(head, dict) and head.get("kind") == "gradient":
                pass_by("sent")

        def pass_by(landmark: str) -> None:
            if backward.calls is not None:
                backward.passed.add(landmark)
                if backward.passed == {"posted", "sent"}:
                    self._finish(BACKWARD)

        def told(frame: FrameType, _none: Any) -> None:
            if isinstance(frame.f_locals["message"], m.Begin) and ready.calls is not None:
                self._finish(READY)

        wire = worker_process._Wire
        self._at_return[Stream.receive_into.__code__] = arrived
        self._at_return[TensorReceiver.frame.__code__] = lambda _frame, _none: forward.drop()
        self._at_call[wire.data_received.__code__] = lambda _frame: self._answer.begin()
        self._at_return[worker_messages.decode_result.__code__] = answered
        self._at_return[wire.ask.__code__] = posted
        self._at_call[Stream.send.__code__] = sent
        self._at_call[sessions._Session.frame.__code__] = lambda _frame: self._frame.begin()
        self._at_return[m.decode.__code__] = decoded
        self._at_return[sessions.VolunteerSessions.tell.__code__] = told

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call":
            if code in self._at_call:
                self._at_call[code](frame)
            file = self._files.get(code)
            if file is None:
                file = self._files[code] = _file_of(code)
            if file and not (code.co_flags & CO_GENERATOR and code.co_code[frame.f_lasti + 1] & RESUMED):
                for track in (*self._tracks.values(), self._answer, self._frame):
                    if track.calls is not None:
                        track.calls.append(file)
        elif event == "return" and code in self._at_return and _returns(frame):
            self._at_return[code](frame, argument)

    def _finish(self, name: str) -> None:
        track = self._tracks[name]
        if self._kept[name] < MOST:
            self._kept[name] += 1
            calls = sorted(set(track.calls or ())) if name == JOIN else track.calls
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"walk": name, "calls": calls}) + "\n")
        track.drop()


def _file_of(code: CodeType) -> str:
    """The file of a function of ours, relative to the package; else empty."""
    ours = (
        code.co_filename.startswith(ROOT)
        and code.co_flags & CO_OPTIMIZED
        and not code.co_name.startswith("<")
    )
    return code.co_filename.removeprefix(ROOT) if ours else ""


def _returns(frame: FrameType) -> bool:
    """Whether a function is left for good: a coroutine that waits "returns" as well, and so does an
    exception.
    """
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


if __name__ == "__main__":
    home = Path(os.environ["HETPEER_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    walker = Walker(home / "walks.jsonl")
    sys.setprofile(walker)
    from hetpeer.peer.cli.main import run

    walker.watch_daemon()
    run()
