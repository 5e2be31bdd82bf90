"""Evidence for the audit: signed lines on the contents of each update, in our own log and at the coordinator.

The log survives `kill -9`. It is evidence and not state, so it is not synced to disk line by line.
"""

from __future__ import annotations

import itertools
import json
import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hetpeer.averaging import effects as e
from hetpeer.averaging.member.tensor_heads import BundleWay, Coded
from hetpeer.averaging.messages import Cover
from hetpeer.bootstrap.log.volunteer_log import Record, read_event, sign_event
from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import LocalError, ProtocolError
from hetpeer.dht.discovery import LeftoverIds
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.process.home import Home
from hetpeer.stages.links.codec import Codec

AT_ONCE = 200
"""Lines read from the log at a time."""


class EventLog:
    """One volunteer's own log, open for appending. Lines for which the disk has no room wait in memory."""

    def __init__(self, path: Path, identity: Identity) -> None:
        """Open or create the file, and cut off an unfinished last line of a killed process."""
        self.path = path
        self.trouble: LocalError | None = None
        """Error of the last attempt to write: the newest lines are in memory only."""
        self._identity = identity
        self._unwritten = b""
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            with path.open("rb") as file:
                lengths = (len(one) for one in file if one.endswith(b"\n"))
                self._ends = array("Q", itertools.accumulate(lengths))
            """Offset at which each line ends, in bytes."""
            os.ftruncate(self._descriptor, self._end)

    @property
    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def _written(self) -> int:
        """Bytes of the lines that are in the file."""
        return self._end - len(self._unwritten)

    def __len__(self) -> int:
        """Number of lines."""
        return len(self._ends)

    def line(self, number: int) -> str:
        """Line `number`, counted from 0."""
        (line,) = self.lines(number, 1)
        return line

    def lines(self, begin: int, most: int) -> list[str]:
        """Lines from line `begin` on, at most `most` of them."""
        last = min(begin + most, len(self))
        if begin >= last:
            return []
        start, end, written = self._ends[begin - 1] if begin else 0, self._ends[last - 1], self._written
        kept = os.pread(self._descriptor, min(end, written) - start, start) if start < written else b""
        return (kept + self._unwritten[max(start - written, 0) : max(end - written, 0)]).decode().splitlines()

    def append(self, record: Record) -> str:
        """Sign and write a record, and those that are still unwritten; returns its line.

        If the disk refuses, `trouble` says why, and the file has whole lines only.
        """
        line = sign_event(record, self._identity)
        data = line.encode() + b"\n"
        self._ends.append(self._end + len(data))
        self._unwritten += data
        try:
            self._write()
        except LocalError as error:
            self.trouble = error
        else:
            self.trouble, self._unwritten = None, b""
        return line

    def _write(self) -> None:
        """Write all unwritten lines. Raises `LocalError` HP-DISK-*, then with the file as it was."""
        with disk_errors(self.path):
            try:
                rest = memoryview(self._unwritten)
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError:
                os.ftruncate(self._descriptor, self._written)
                raise

    def close(self) -> None:
        """Close the file; nothing can be appended any more."""
        os.close(self._descriptor)


class EvidenceLog:
    """One peer's event log of one run."""

    def __init__(self, home: Home, run: RunDirectory, identity: Identity) -> None:
        self._run_id = run.run_id
        self._peer = identity.peer_id
        self._log = EventLog(home.events_path(run), identity)
        self._found_in: e.StepId | None = None
        self._most = len(run.manifest.blocks)
        """Most lines on leftovers in a step: a coordinator has room for one a block (volunteer_log_files)."""
        self._lines = 0
        self._found: set[tuple[str, int, int]] = set()
        """(sender, border, id) of leftovers that are written down for that step."""

    @property
    def trouble(self) -> LocalError | None:
        """Error of the disk because of which the newest lines are in memory only."""
        return self._log.trouble

    def applied(
        self,
        applied: e.RecordApplied,
        incarnation: int,
        arithmetic: str,
        bundles: Mapping[BundleWay, Mapping[int, Coded]] = MappingProxyType({}),
    ) -> list[str]:
        """Write one line per block on a step's update; returns the lines.

        `arithmetic`: what decides the last bits of this machine's numbers (arithmetic.py). `bundles`: way →
        microbatch → how its bundle was coded.
        """
        line, number = applied.step.line, applied.step.number
        return [
            self._log.append(
                {
                    "kind": "applied",
                    "run": self._run_id,
                    "peer": self._peer,
                    "incarnation": incarnation,
                    "term": line.term,
                    "view": line.view,
                    "cluster": line.cluster,
                    "step": number,
                    "batch": applied.step.batch,
                    "base": applied.step.base_of(cover.block),
                    "group": applied.step.group,
                    "block": cover.block,
                    "plan": applied.plan,
                    "cover": [[holder, list(ids)] for holder, ids in cover.slots],
                    **({"runs": [list(runs) for runs in cover.runs]} if cover.runs else {}),
                    **self._coded(cover, bundles),
                    "arithmetic": arithmetic,
                    "gradient": applied.gradients[cover.block],
                    "state": applied.states[cover.block],
                }
            )
            for cover in applied.covers
        ]

    def _coded(self, cover: Cover, bundles: Mapping[BundleWay, Mapping[int, Coded]]) -> dict[str, list[Any]]:
        """Fields on coded bundles of the ids that we have in the sum of the block of `cover`."""
        own = [number for holder, ids in cover.slots if holder == self._peer for number in ids]
        before, after = cover.block, cover.block + 1
        ways = {
            "entered": BundleWay(before, gradient=False, sent=False),
            "given_back": BundleWay(before, gradient=True, sent=True),
            "passed_on": BundleWay(after, gradient=False, sent=True),
            "returned": BundleWay(after, gradient=True, sent=False),
        }
        fields = {}
        for name, way in ways.items():
            coded = bundles.get(way, {})
            if said := _alike({number: coded[number] for number in own if number in coded}):
                fields[name] = said
        return fields

    def found(self, step: e.StepId, incarnation: int, sender: str, found: LeftoverIds) -> list[str]:
        """Write down which microbatches the task board showed us; returns the new line.

        Returns nothing if all are written down already, or after as many lines as there are blocks: a peer
        could show us more and more leftovers to fill our log.
        """
        if step != self._found_in:
            self._found_in, self._found, self._lines = step, set(), 0
        fresh = [number for number in found.ids if (sender, found.border, number) not in self._found]
        self._found.update((sender, found.border, number) for number in fresh)
        if not fresh or self._lines == self._most:
            return []
        self._lines += 1
        return [
            self._log.append(
                {
                    "kind": "leftover",
                    "run": self._run_id,
                    "peer": self._peer,
                    "incarnation": incarnation,
                    "term": step.line.term,
                    "view": step.line.view,
                    "cluster": step.line.cluster,
                    "step": step.number,
                    "border": found.border,
                    "sender": sender,
                    "ids": fresh,
                }
            )
        ]

    def after(self, last: str) -> Iterator[list[str]]:
        """Our lines that a coordinator lacks, in batches; lines written meanwhile are included.

        `last` is the last line of this identity that it has; empty: it has none. If `last` is not in our log,
        it is from another home, or from before a power cut. Incarnations rise from line to line, wherever
        they were written: lines of an earlier incarnation were told before, or come too late to be told in
        order. Raises `ProtocolError` unless `last` is a line of this identity.
        """
        return self._batches_from(self._first_to_send(last))

    def _batches_from(self, number: int) -> Iterator[list[str]]:
        """All lines from `number` on, at most AT_ONCE in a batch."""
        while some := self._log.lines(number, AT_ONCE):
            yield some
            number += len(some)

    def _first_to_send(self, last: str) -> int:
        """Number of the first line to send: the one that follows `last`.

        If `last` is not in our log, this is the first line of a later incarnation than its own; the number of
        all lines if there is none.
        """
        if not last:
            return 0
        kept, begin = self._incarnation_of(last), len(self._log)
        for number in reversed(range(len(self._log))):
            line = self._log.line(number)
            if line == last:
                return number + 1
            incarnation = json.loads(line)["record"]["incarnation"]
            if incarnation < kept:
                break
            if incarnation > kept:
                begin = number
        return begin

    def _incarnation_of(self, line: str) -> int:
        signer, record = read_event(line)
        incarnation = record.get("incarnation")
        if signer != self._peer or not isinstance(incarnation, int):
            raise ProtocolError("a line that is said to be ours is not")
        return incarnation

    def close(self) -> None:
        """Close the log file."""
        self._log.close()


def _alike(coded: Mapping[int, Coded]) -> list[Any]:
    """[codec, kept of each tensor, ids] of bundles that were coded alike."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for number, one in coded.items():
        kept = tuple(part.kept for part in one.written) if Codec.of(one.codec).sparse else ()
        groups.setdefault((one.codec, kept), []).append(number)
    return [[codec, list(kept), ids] for (codec, kept), ids in groups.items()]
