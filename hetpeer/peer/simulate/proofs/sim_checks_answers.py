"""A simulated volunteer's part in spot checks, as its worker and its daemon have it; and the lies that may be told there (sim_config.py)."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.member.given_inputs import Given, Seen
from hetpeer.averaging.reduce.received_parts import Received
from hetpeer.peer.simulate.proofs.liars import Lying
from hetpeer.peer.simulate.sim_numerics import Numerics
from hetpeer.stages.block.fingerprint import KEY_BYTES, PLACES, pack
from hetpeer.stages.pipeline import effects as p

TOLERANCE = 1e-9
MUCH = 50
"""Times what it is."""
LATE = 8
"""Steps after which it is known what is usual."""


UNSAID = {"refuses": m.Checked, "hides": m.Shown, "mute": m.Compared, "abstains": m.Vote}
"""Lie → the message that never comes."""


def false_in(sent: p.SendActivation | p.SendGradient, *, answers: bool) -> str:
    """The lie of who sends something false there; `answers`: to a checker that has asked."""
    if isinstance(sent, p.SendGradient):
        return "accuses" if sent.check else "answers" if answers else "gradients"
    return "accuses" if sent.asks else "lends" if sent.check else "outputs"


class Checking:
    """Of volunteer `name`, whose `lies` are told. What it computes with may be asked for if there are `checks`."""

    def __init__(self, name: str, numerics: Numerics, lies: frozenset[str], *, checks: bool) -> None:
        self._name = name
        self._numerics = numerics
        self._lies = lies
        self.lying = Lying(name, numerics, lies)
        self._checks = checks
        self._keys = itertools.count()
        self._received = Received(self._draw)
        self._given = Given(self._draw, TOLERANCE)
        self._askers: set[tuple[str, int, int]] = set()
        """Checkers that have asked for a gradient, with its microbatch and border."""

    def _draw(self) -> bytes:
        return next(self._keys).to_bytes(KEY_BYTES, "little")

    def end_step(self, step: e.StepId) -> None:
        """Nobody will ask for anything of it any more."""
        self._received.end_step(step)
        self._given.end_step(step)

    # ── what is false ────────────────────────────────────────────────────────────────────────────────────────────

    def sum_sent(self, value: Any, step: int, to: str) -> Any:
        """A part of our sums of `step`, as `to` gets it, its reducer."""
        if "exaggerates" in self._lies and step >= LATE:
            return self._numerics.add([value] * MUCH)
        lies = "sends" in self._lies or ("pads" in self._lies and to == self._name)
        return self._numerics.lie(value, "a liar") if lies else value

    def bundle_sent(self, sent: p.SendActivation | p.SendGradient, value: Any) -> Any:
        """A bundle of ours, as others get it."""
        answers = isinstance(sent, p.SendGradient) and (sent.to, sent.id, sent.border) in self._askers
        lies = false_in(sent, answers=answers) in self._lies
        return self._numerics.forge(value, "a liar") if lies else value

    def says(self, message: m.Message) -> bool:
        """Whether it tells the coordinator so."""
        evades = "evades" in self._lies and isinstance(message, m.Shown) and bool(message.given)
        return not evades and not any(isinstance(message, UNSAID[lie]) for lie in UNSAID.keys() & self._lies)

    # ── what is seen ─────────────────────────────────────────────────────────────────────────────────────────────

    def summed(self, step: e.StepId, work: e.SumParts, parts: Iterable[Any]) -> list[float]:
        """These parts are added here. Returns how long they are, squared."""
        wanted = self._received.wanted(step, work.shard, work.marks)
        lengths: list[float] = []
        for holder, part in zip(work.holders, parts, strict=False):
            seen = self._numerics.lie(part, "a reducer") if "received" in self._lies else part
            marks = [
                self._numerics.fingerprint(seen, (one.block, one.begin, one.end), one.key) for one in wanted
            ]
            self._received.add(step, work.shard, holder, marks, work.marks)
            lengths.append(float(marks[0] @ marks[0]))
        return lengths

    def used(
        self, step: e.StepId, key: p.TaskKey, border: int, sender: str, bundle: Any, *, back: bool = False
    ) -> None:
        """`key` is computed from `bundle`."""
        if self._checks:
            seen = self._given.used(step, key, border, sender, back=back)
            seen.marks = self._mark(bundle, self._given.secret(step))
            false = key.id.to_bytes(4, "little") if "excuses" in self._lies else b""
            seen.digest = hashlib.blake2b(
                self._mark(bundle, bytes(KEY_BYTES)) + false, digest_size=16
            ).digest()

    def _mark(self, bundle: Any, key: bytes) -> bytes:
        return pack(self._numerics.mark(bundle, key))

    # ── what is said ─────────────────────────────────────────────────────────────────────────────────────────────

    def compared(self, step: e.StepId, bundle: p.CompareBundle, value: Any) -> m.Compared:
        """`CompareBundle` → a message to the coordinator."""
        if not bundle.back:
            self._askers.add((bundle.peer, bundle.id, bundle.border))
        seen = Seen(
            p.TaskKey(bundle.id, bundle.border, bundle.check), bundle.border, bundle.back, bundle.peer
        )
        seen.marks = self._mark(value, self._given.secret(step))
        word = self._given.compared(step, bundle, seen)
        if "slanders" in self._lies:
            return word.model_copy(update={"alike": (), "differ": (*word.alike, *word.differ)})
        return word

    def shown(self, step: e.StepId, asked: m.Show, sums: Callable[[int], Any]) -> m.Shown:
        """`ShowMarks` → a message to the coordinator; `sums`: those of the check at a block."""
        marks, given = self._received.of(step, asked.plan, asked.peer), self._given.show(step, 0)
        if not asked.peer:
            marks = tuple(self._shown(mark, sums(mark.block)) for mark in asked.marks)
            given = self._given.show(step, asked.check)
        return m.Shown(
            line=asked.line,
            step=asked.step,
            check=asked.check,
            plan=asked.plan,
            marks=marks,
            given=given if asked.peer in ("", self._name) else (),
        )

    def _shown(self, mark: m.Mark, sums: Any) -> m.Mark:
        return self._marked(mark, self._numerics.lie(sums, "a checker") if "check" in self._lies else sums)

    def _marked(self, mark: m.Mark, value: Any) -> m.Mark:
        """`mark` as it is of a block's whole vector."""
        piece = self._numerics.shard(value, mark.begin, mark.end)
        seen = self._numerics.fingerprint(piece, (mark.block, mark.begin, mark.end), mark.key)
        return mark.model_copy(update={"values": pack(seen)})

    # ── proofs of sums ───────────────────────────────────────────────────────────────────────────────────────────

    def proved(
        self,
        step: e.StepId,
        asked: m.Prove,
        parts: Mapping[int, Any],
        sums: Mapping[int, Sequence[tuple[e.Shard, Any]]],
    ) -> m.Proved:
        """`ProveSums` → a message to the coordinator. `parts` and `sums` per block."""
        sent = {
            block: self._sent(parts[block], shards, step.number)
            for block, shards in sums.items()
            if block in parts
        }
        return m.Proved(
            line=asked.line,
            step=asked.step,
            plan=asked.plan,
            parts=tuple(
                self._of_shards(mark, self._said(mark, sent[mark.block]))
                for mark in asked.marks
                if mark.block in sent
            ),
            sums=tuple(
                self._of_shards(mark, [(shard, self.lying.got(value)) for shard, value in sums[mark.block]])
                for mark in asked.marks
                if mark.block in sums
            ),
            key=self._received.key(step, asked.plan),
        )

    def _sent(self, own: Any, shards: Sequence[tuple[e.Shard, Any]], step: int) -> list[tuple[e.Shard, Any]]:
        """What of our sums at a block was sent to whom, as we say."""
        pieces = [(shard, self._numerics.shard(own, shard.begin, shard.end)) for shard, _ in shards]
        return [
            (shard, self.lying.claimed(self.sum_sent(piece, step, shard.reducer))) for shard, piece in pieces
        ]

    def _said(self, mark: m.Mark, shards: Sequence[tuple[e.Shard, Any]]) -> Sequence[tuple[e.Shard, Any]]:
        """What of it we say where `mark` is asked for."""
        if all(mark.begin <= shard.begin and shard.end <= mark.end for shard, _ in shards):
            return shards
        return [(shard, self.lying.covered(piece, shard.reducer)) for shard, piece in shards]

    def _of_shards(self, mark: m.Mark, shards: Sequence[tuple[e.Shard, Any]]) -> m.Mark:
        """`mark` of a vector that lies in `shards`."""
        total = np.zeros(PLACES)
        for shard, value in shards:
            begin, end = max(mark.begin, shard.begin), min(mark.end, shard.end)
            if begin < end:
                piece = self._numerics.shard(value, begin - shard.begin, end - shard.begin)
                total += self._numerics.fingerprint(piece, (mark.block, begin, end), mark.key)
        return mark.model_copy(update={"values": pack(total)})

    def testimony(self, step: e.StepId, asked: m.Testify) -> m.Testimony:
        """`TestifyParts` → a message to the coordinator."""
        received = self._received.testify(step, asked.plan, asked.marks)
        return m.Testimony(
            line=asked.line, step=asked.step, plan=asked.plan, received=self.lying.testified(received)
        )
