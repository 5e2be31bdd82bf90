"""A holder's answers to checks of its work (docs/trust.md), besides computing.

Spot checks: inputs are remembered, bundles compared, digests shown. Sum proofs: fingerprints are shown of
what was received, sent and added up in a reduce.
"""

from __future__ import annotations

import secrets
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.member.kept_fingerprints import GivenInput, GivenInputs, ReceivedParts
from hetpeer.peer.training.task_execution import HeldPlace
from hetpeer.peer.transport.tensor_store import Tensor
from hetpeer.peer.transport.worker_posts import Answer
from hetpeer.stages.block.fingerprint import KEY_BYTES, unpack
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc import worker_messages as r
from hetpeer.stages.ipc.arena import BundleLayout
from hetpeer.stages.ipc.block_commands import MarkBundle
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.gradient_slots import CHECKS


class SpotCheckAnswers:
    """The worker's side of the spot checks of one place, in a run that has them."""

    def __init__(self, place: HeldPlace) -> None:
        self._posts = place.posts
        self._schema = schema = place.schema
        self._me = place.me
        self._perform = place.perform
        self._given = GivenInputs(lambda: secrets.token_bytes(KEY_BYTES), schema.tolerance)

    def forward(self, step: e.StepId, work: p.RunForward) -> Answer | None:
        """`RunForward` computes from a bundle. To be called before it is released."""
        key = work.key
        if not work.train or not isinstance(work.source, Tensor):
            return None
        seen = self._given.used(step, key, key.begin, work.source.sender, back=False)
        return self._post(step, work.source, self._schema.input_layout(key.begin, key.id), seen)

    def backward(self, step: e.StepId, work: p.RunBackward) -> Answer | None:
        """`RunBackward` computes from a gradient. To be called before it is released."""
        if not isinstance(work.gradient, Tensor):
            return None
        seen = self._given.used(step, work.key, work.end, work.gradient.sender, back=True)
        layout = self._schema.output_layout(work.end, work.key.id, gradients=True)
        return self._post(step, work.gradient, layout, seen)

    def _post(self, step: e.StepId, tensor: Tensor, layout: BundleLayout, seen: GivenInput) -> Answer:
        command = MarkBundle(tensors=layout.tensors(tensor.extent), key=self._given.secret(step))
        posted = self._posts.post(command, [tensor])

        async def answer() -> None:
            done = await posted
            seen.marks, seen.exact, seen.digest = done.marks, done.exact, done.digest

        return answer()

    def compare(self, step: e.StepId, bundle: p.CompareBundle) -> Answer:
        """`CompareBundle` → a message to the coordinator."""
        assert isinstance(bundle.handle, Tensor)
        place = bundle.border, bundle.id
        layout = (
            self._schema.output_layout(*place, gradients=True)
            if bundle.back
            else self._schema.input_layout(*place)
        )
        seen = GivenInput(
            p.TaskKey(bundle.id, bundle.border, bundle.check), bundle.border, bundle.back, bundle.peer
        )
        posted = self._post(step, bundle.handle, layout, seen)

        async def answer() -> None:
            await posted
            self._perform([e.Tell(self._given.compared(step, bundle, seen))])

        return answer()

    def given(self, step: e.StepId, asked: m.Show) -> tuple[m.Given, ...]:
        """Inputs of the computations `asked` about; () if the question is about another peer."""
        if asked.peer not in ("", self._me):
            return ()
        return self._given.show(step, 0 if asked.peer else asked.check)

    def end_step(self, step: e.StepId) -> None:
        """Forget `step`: no coordinator asks for it any more."""
        self._given.end_step(step)


class SumProofAnswers:
    """The worker's side of the fingerprints of one place."""

    def __init__(self, place: HeldPlace) -> None:
        self._posts = place.posts
        self._schema = place.schema
        self._perform = place.perform
        self._received = ReceivedParts(lambda: secrets.token_bytes(KEY_BYTES))

    # ── received ────────────────────────────────────────────────────────────────────────────────────────────

    def markings(self, step: e.StepId, work: e.SumParts) -> tuple[v.Marking, ...]:
        """Ranges and keys at which the parts of `work` are fingerprinted; () without spot checks."""
        if not self._schema.trust.spot_checks or step.group:
            return ()
        return tuple(map(_marking, self._received.wanted(step, work.shard, work.marks)))

    def received(self, step: e.StepId, work: e.SumParts, marks: Sequence[bytes], each: int) -> list[float]:
        """Keep `marks`, the fingerprints of the parts of `work`, `each` per part; returns squared lengths."""
        own = [unpack(one) for one in marks]
        for place, holder in enumerate(work.holders if own else ()):
            self._received.add(step, work.shard, holder, own[place * each : (place + 1) * each], work.marks)
        return [float(one @ one) for one in own[::each]] if each else []

    # ── shown ───────────────────────────────────────────────────────────────────────────────────────────────

    def show(self, step: e.StepId, work: e.ShowMarks, given: tuple[m.Given, ...]) -> Answer:
        """`ShowMarks` → a message to the coordinator.

        It has fingerprints of what we have received of a peer, or of the slot of a spot check, and the inputs
        `given` for it.
        """
        asked = work.asked
        posted = [] if asked.peer else [self._slot(step, CHECKS + asked.check, mark) for mark in asked.marks]

        async def answer() -> None:
            marks = self._received.of(step, asked.plan, asked.peer)
            if not asked.peer:
                marks = await _filled(asked.marks, posted)
            shown = m.Shown(
                line=asked.line,
                step=asked.step,
                check=asked.check,
                plan=asked.plan,
                marks=marks,
                given=given,
            )
            self._perform([e.Tell(shown)])

        return answer()

    def prove(self, step: e.StepId, work: e.ProveSums) -> Answer:
        """`ProveSums` → a message to the coordinator: what we have sent, and what has come of all."""
        asked = work.asked
        sent = [mark for mark in asked.marks if mark.block in work.slots]
        got = [mark for mark in asked.marks if mark.block in work.sums]
        parts = [self._slot(step, work.slots[mark.block], mark) for mark in sent]
        sums = [self._vector(work.sums[mark.block], mark) for mark in got]

        async def answer() -> None:
            proved = m.Proved(
                line=asked.line,
                step=asked.step,
                plan=asked.plan,
                parts=await _filled(sent, parts),
                sums=await _filled(got, sums),
                key=self._received.key(step, asked.plan),
            )
            self._perform([e.Tell(proved)])

        return answer()

    def testify(self, step: e.StepId, work: e.TestifyParts) -> None:
        """`TestifyParts` → a message to the coordinator."""
        asked = work.asked
        received = self._received.testify(step, asked.plan, asked.marks)
        said = m.Testimony(line=asked.line, step=asked.step, plan=asked.plan, received=received)
        self._perform([e.Tell(said)])

    def end_step(self, step: e.StepId) -> None:
        """Forget `step`: no coordinator asks for it any more."""
        self._received.end_step(step)

    def _slot(self, step: e.StepId, slot: int, mark: m.Mark) -> Coroutine[Any, Any, r.Marked]:
        return self._posts.post(v.MarkSlot(step=step.number, slot=slot, marking=_marking(mark)), ())

    def _vector(self, shards: Iterable[tuple[e.Shard, Any]], mark: m.Mark) -> Coroutine[Any, Any, r.Marked]:
        within = [(shard, t) for shard, t in shards if shard.begin < mark.end and mark.begin < shard.end]
        tensors = [tensor for _, tensor in within if isinstance(tensor, Tensor)]
        command = v.MarkVector(
            pieces=tuple(tensor.extent for tensor in tensors),
            begin=within[0][0].begin if within else mark.begin,
            marking=_marking(mark),
        )
        return self._posts.post(command, tensors)


def _marking(mark: m.Mark) -> v.Marking:
    return v.Marking(block=mark.block, begin=mark.begin, end=mark.end, key=mark.key)


async def _filled(
    marks: Sequence[m.Mark], posted: Sequence[Coroutine[Any, Any, r.Marked]]
) -> tuple[m.Mark, ...]:
    """`marks` with their values."""
    found = [await one for one in posted]
    return tuple(
        mark.model_copy(update={"values": one.marks}) for mark, one in zip(marks, found, strict=True)
    )
