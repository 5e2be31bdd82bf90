"""Conduct of volunteers in histories: spot checks and sum proofs are answered, faults are injected, and lies
are told (config.py).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.member.kept_fingerprints import GivenInput, GivenInputs, ReceivedParts
from hetpeer.peer.simulate.sim_hooks import UNUSABLE
from hetpeer.peer.simulate.sim_volunteer import SimVolunteer
from hetpeer.peer.simulate.sim_worker import REDUCE_S
from hetpeer.stages.block.fingerprint import KEY_BYTES, PLACES, pack
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.gradient_slots import CHECKS
from tests.simulation.lies import LyingConduct

TOLERANCE = 1e-9
MUCH = 50
"""Factor by which a sum is exaggerated."""
LATE = 8
"""Steps after which it is known what is usual."""
WAVERS_S = 0.5
"""Seconds after which a waverer takes back that it is ready."""

UNSAID = {"refuses": m.Checked, "hides": m.Shown, "mute": m.Compared, "abstains": m.Vote}
"""Lie → the message that never comes."""


def false_in(sent: p.SendActivation | p.SendGradient, *, answers: bool) -> str:
    """Name of the lie that makes `sent` false; `answers`: it goes to a checker that has asked."""
    if isinstance(sent, p.SendGradient):
        return "accuses" if sent.check else "answers" if answers else "gradients"
    return "accuses" if sent.asks else "lends" if sent.check else "outputs"


class HistoryConduct(LyingConduct):
    """Conduct of one process of `volunteer`.

    `poison`: marks of work that fails once. Inputs may be asked for if there are `checks`.
    """

    def __init__(
        self, volunteer: SimVolunteer, lies: frozenset[str], poison: set[int], *, checks: bool
    ) -> None:
        super().__init__(volunteer.name, volunteer.swarm.numerics, lies)
        self.spoils = 0
        """Number of parts, sent next, that cannot be added."""
        self._volunteer = volunteer
        self._worker = volunteer.worker
        self._process = volunteer.process
        self._poison = poison
        self._checks = checks
        self._keys = itertools.count()
        self._received = ReceivedParts(self._draw)
        self._given = GivenInputs(self._draw, TOLERANCE)
        self._askers: set[tuple[str, int, int]] = set()
        """Checkers that have asked for a gradient, with its microbatch and border."""

    def _draw(self) -> bytes:
        return next(self._keys).to_bytes(KEY_BYTES, "little")

    def step_over(self, step: e.StepId) -> None:
        self._received.end_step(step)
        self._given.end_step(step)

    # ── faults ──────────────────────────────────────────────────────────────────────────────────────────────

    def computation_fails(self, mark: int) -> bool:
        if mark not in self._poison:
            return False
        self._poison.discard(mark)
        return True

    def part_sent(self, value: Any, step: e.StepId, work: e.SendPart) -> Any:
        if work.slot not in (e.STATE, e.COPY):
            value = self._sum_sent(value, step.number, work.shard.reducer)
        if not self.spoils:
            return value
        self.spoils -= 1
        return UNUSABLE

    # ── lies ────────────────────────────────────────────────────────────────────────────────────────────────

    def _sum_sent(self, value: Any, step: int, to: str) -> Any:
        """Part of our sums of `step`, as its reducer `to` gets it."""
        if "exaggerates" in self.lies and step >= LATE:
            return self._numerics.add([value] * MUCH)
        lies = "sends" in self.lies or ("pads" in self.lies and to == self._name)
        return self._numerics.lie(value, "a liar") if lies else value

    def bundle_sent(self, sent: p.SendActivation | p.SendGradient, value: Any) -> Any:
        answers = isinstance(sent, p.SendGradient) and (sent.to, sent.id, sent.border) in self._askers
        lies = false_in(sent, answers=answers) in self.lies
        return self._numerics.forge(value, "a liar") if lies else value

    def says(self, message: m.Message) -> bool:
        evades = "evades" in self.lies and isinstance(message, m.Shown) and bool(message.given)
        return not evades and not any(isinstance(message, UNSAID[lie]) for lie in UNSAID.keys() & self.lies)

    def said(self, message: m.Message) -> None:
        """A waverer takes back a moment later that it is ready."""
        if isinstance(message, m.Ready) and "wavers" in self.lies:
            volunteer, process = self._volunteer, self._process
            doubt = e.Tell(m.Prepared(flops_per_second=volunteer.speed))
            volunteer.swarm.world.after(WAVERS_S, lambda: volunteer.later(process, lambda _: [doubt]))

    def fetches_states(self) -> bool:
        return "dawdles" not in self.lies

    # ── observations ────────────────────────────────────────────────────────────────────────────────────────

    def squared_lengths(self, step: e.StepId, work: e.SumParts, parts: Sequence[Any]) -> Sequence[float]:
        wanted = self._received.wanted(step, work.shard, work.marks)
        lengths: list[float] = []
        for holder, part in zip(work.holders, parts, strict=False):
            seen = self._numerics.lie(part, "a reducer") if "received" in self.lies else part
            marks = [
                self._numerics.fingerprint(seen, (one.block, one.begin, one.end), one.key) for one in wanted
            ]
            self._received.add(step, work.shard, holder, marks, work.marks)
            lengths.append(float(marks[0] @ marks[0]))
        return lengths

    def used(
        self, step: e.StepId, key: p.TaskKey, border: int, sender: str, bundle: Any, *, back: bool = False
    ) -> None:
        if self._checks:
            seen = self._given.used(step, key, border, sender, back=back)
            seen.marks = self._mark(bundle, self._given.secret(step))
            false = key.id.to_bytes(4, "little") if "excuses" in self.lies else b""
            seen.digest = hashlib.blake2b(
                self._mark(bundle, bytes(KEY_BYTES)) + false, digest_size=16
            ).digest()

    def _mark(self, bundle: Any, key: bytes) -> bytes:
        return pack(self._numerics.mark(bundle, key))

    # ── answers ─────────────────────────────────────────────────────────────────────────────────────────────

    def answer(
        self, step: e.StepId, asked: p.CompareBundle | e.ShowMarks | e.ProveSums | e.TestifyParts
    ) -> None:
        worker, finish = self._worker, self._answer_to(step, asked)
        seconds = 0.0 if isinstance(asked, e.TestifyParts) else worker.besides(REDUCE_S)
        worker.submit(seconds, lambda core: [e.Tell(finish())] if core.work.works_on(step) else [])

    def _answer_to(
        self, step: e.StepId, asked: p.CompareBundle | e.ShowMarks | e.ProveSums | e.TestifyParts
    ) -> Callable[[], m.FromVolunteer]:
        """Makes the answer when the worker comes to it; tensors are those of this moment."""
        boxes = self._worker.boxes
        match asked:
            case p.CompareBundle(handle=handle):
                value = boxes.value(handle)
                return lambda: self.compared(step, asked, value)
            case e.ShowMarks(show):
                return lambda: self.shown(
                    step, show, lambda block: self._worker.slots[step.number, CHECKS + show.check, block]
                )
            case e.ProveSums(prove):
                sums = {
                    block: [(one, boxes.value(handle)) for one, handle in own]
                    for block, own in asked.sums.items()
                }
                return lambda: self.proved(
                    step,
                    prove,
                    {
                        block: self._worker.slots[step.number, slot, block]
                        for block, slot in asked.slots.items()
                    },
                    sums,
                )
            case e.TestifyParts(testify):
                return lambda: self.testimony(step, testify)

    def compared(self, step: e.StepId, bundle: p.CompareBundle, value: Any) -> m.Compared:
        """`CompareBundle` → a message to the coordinator."""
        if not bundle.back:
            self._askers.add((bundle.peer, bundle.id, bundle.border))
        seen = GivenInput(
            p.TaskKey(bundle.id, bundle.border, bundle.check), bundle.border, bundle.back, bundle.peer
        )
        seen.marks = self._mark(value, self._given.secret(step))
        word = self._given.compared(step, bundle, seen)
        if "slanders" in self.lies:
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
        return self._marked(mark, self._numerics.lie(sums, "a checker") if "check" in self.lies else sums)

    def _marked(self, mark: m.Mark, value: Any) -> m.Mark:
        """`mark` with the fingerprint of a block's whole vector."""
        piece = self._numerics.shard(value, mark.begin, mark.end)
        seen = self._numerics.fingerprint(piece, (mark.block, mark.begin, mark.end), mark.key)
        return mark.model_copy(update={"values": pack(seen)})

    # ── proofs of sums ──────────────────────────────────────────────────────────────────────────────────────

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
                self._of_shards(mark, [(shard, self.got(value)) for shard, value in sums[mark.block]])
                for mark in asked.marks
                if mark.block in sums
            ),
            key=self._received.key(step, asked.plan),
        )

    def _sent(self, own: Any, shards: Sequence[tuple[e.Shard, Any]], step: int) -> list[tuple[e.Shard, Any]]:
        """Shards of this volunteer's sums at a block, as it claims to have sent them."""
        pieces = [(shard, self._numerics.shard(own, shard.begin, shard.end)) for shard, _ in shards]
        return [(shard, self.claimed(self._sum_sent(piece, step, shard.reducer))) for shard, piece in pieces]

    def _said(self, mark: m.Mark, shards: Sequence[tuple[e.Shard, Any]]) -> Sequence[tuple[e.Shard, Any]]:
        """The same, as it says if `mark` is asked for."""
        if all(mark.begin <= shard.begin and shard.end <= mark.end for shard, _ in shards):
            return shards
        return [(shard, self.covered(piece, shard.reducer)) for shard, piece in shards]

    def _of_shards(self, mark: m.Mark, shards: Sequence[tuple[e.Shard, Any]]) -> m.Mark:
        """`mark` with the fingerprint of a vector that lies in `shards`."""
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
            line=asked.line, step=asked.step, plan=asked.plan, received=self.testified(received)
        )
