"""Carries out the effects of a reduce and of an update with the compute worker, and answers the core."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.member.tensor_heads import Coded
from hetpeer.peer.training.check_answers import SumProofAnswers
from hetpeer.peer.training.landed_sums import LandedSums
from hetpeer.peer.training.task_execution import HeldPlace
from hetpeer.peer.transport.tensor_schema import FLOAT_BYTES
from hetpeer.peer.transport.tensor_store import Tensor
from hetpeer.peer.transport.worker_posts import Answer
from hetpeer.stages.block.parameter_groups import group_ranges
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc import worker_messages as r
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.worker_messages import CommandFailedError
from hetpeer.stages.links.codec import Codec, EncodedTensor


class ReduceExecution:
    """The worker's side of the reduces of one place, of peer `me`."""

    def __init__(self, place: HeldPlace, proofs: SumProofAnswers) -> None:
        self._member = place.member
        self._posts = place.posts
        self._book = place.book
        self._store = place.posts.store
        self._schema = schema = place.schema
        self._perform = place.perform
        self._me = place.me
        self._codec = Codec.of(schema.links.reduce)
        self._feedback = schema.links.feedback
        self._proofs = proofs
        self._landed = LandedSums(self._store, schema)

    # ── as others get it ────────────────────────────────────────────────────────────────────────────────────

    def outgoing(self, to: str, tensor: Tensor) -> Tensor:
        """Tensor that peer `to` gets for a part or a sum: in the run's codec, unless it is for ourselves."""
        return tensor if to == self._me or tensor.written is None else tensor.written

    @property
    def coded_smaller(self) -> bool:
        """Whether shards are encoded: links then wait for processors too; bytes sent tell no link rate."""
        return self._codec.values is not None

    def coded(self, elements: int) -> Coded:
        """The head's field for a shard of `elements` in the run's codec."""
        return Coded(codec=str(self._codec), written=(EncodedTensor(elements),))

    def _rounding(self, step: e.StepId, shard: e.Shard, parts: int = 0) -> v.Rounding | None:
        """Rounding of our part of `shard`, or of the sum of `parts` many; None if shards are not encoded."""
        if not self.coded_smaller or self._codec.of_movements:
            return None
        averages = step.group > 0
        return v.Rounding(
            codec=str(self._codec),
            plan=shard.plan,
            block=shard.block,
            begin=shard.begin,
            keeps=(v.PARAMETERS if averages else v.GRADIENTS)[parts > 0]
            if averages or self._feedback
            else "",
            parts=parts if parts and averages else 1,
        )

    # ── the effects ─────────────────────────────────────────────────────────────────────────────────────────

    def export(
        self, step: e.StepId, part: e.SendPart, then: Callable[[Tensor], None], free: Callable[[], None]
    ) -> Answer:
        """`then` gets the elements of a shard, of our slot, STATE or COPY; `free` is told when they go."""
        shard = part.shard
        count = shard.end - shard.begin
        moved = part.slot == e.STATE and self._codec.of_movements
        coded = moved and shard.reducer != self._me
        piece = self._store.new(step, self._coded_bytes(count) if coded else count * FLOAT_BYTES)
        piece.once = True
        self._store.lend(piece, free)
        command = self._export_of(step, part, piece.extent)
        posted = self._posts.post(command, [piece])

        async def answer() -> None:
            try:
                exported = await posted
            except CommandFailedError:
                self._store.release(piece)
                raise
            if exported.rounded:
                self._is_coded(piece, shard)
            if not piece.released:  # the step may be over meanwhile
                then(piece)

        return answer()

    def _export_of(
        self, step: e.StepId, part: e.SendPart, extent: Extent
    ) -> v.ExportMovement | v.ExportState | v.ExportSlot:
        shard, slot, ours = part.shard, part.slot, part.shard.reducer == self._me
        common: dict[str, Any] = {
            "block": shard.block,
            "begin": shard.begin,
            "end": shard.end,
            "extent": extent,
        }
        if slot == e.STATE and self._codec.of_movements:
            return v.ExportMovement(**common, decoded=ours)
        rounding = None if ours else self._rounding(step, shard)
        if slot in (e.STATE, e.COPY):
            return v.ExportState(**common, rounding=rounding, copy=slot == e.COPY)
        return v.ExportSlot(**common, rounding=rounding, step=step.number, slot=slot)

    def _is_coded(self, tensor: Tensor, shard: e.Shard) -> None:
        tensor.coded, tensor.length = True, self._coded_bytes(shard.end - shard.begin)

    def _coded_bytes(self, elements: int) -> int:
        assert self._codec.values is not None
        return self._codec.values.nbytes(elements)

    def sum(self, step: e.StepId, work: e.SumParts) -> Answer | None:
        """`SumParts` → `summed`, or `unusable` for a part of another length or with numbers that are not
        finite.

        No honest holder sends such a part: its worker refuses each gradient that is not finite. A sum of
        finite parts that is not finite concerns all holders, and is voted on.
        """
        shard = work.shard
        elements = shard.end - shard.begin
        parts = [part for part in work.parts if isinstance(part, Tensor)]
        for place, part in enumerate(parts):
            if part.extent.nbytes != elements * FLOAT_BYTES:
                why = f"a shard of {part.extent.nbytes} bytes, and the plan says {elements * FLOAT_BYTES}"
                self._perform(self._member.work.unusable(step, shard, place, why))
                return None
        rounding = self._rounding(step, shard, len(parts)) if work.shared else None
        markings = self._proofs.markings(step, work)
        if (
            len(parts) == 1 and rounding is None and not markings and not parts[0].sender
        ):  # our own: nothing is added to zeros
            total = self._store.share(parts[0])

            async def at_once() -> None:
                self._perform(self._member.work.summed(step, shard, total))

            return at_once()
        return self._sum(step, work, rounding, markings)

    def _sum(
        self,
        step: e.StepId,
        work: e.SumParts,
        rounding: v.Rounding | None,
        markings: tuple[v.Marking, ...],
    ) -> Answer:
        """Add up the parts of a shard in the worker; the result goes to the core. Posted now."""
        shard = work.shard
        parts = [part for part in work.parts if isinstance(part, Tensor)]
        elements = shard.end - shard.begin
        total = self._store.new(step, elements * FLOAT_BYTES)
        written = None if rounding is None else self._store.new(step, self._coded_bytes(elements))
        command = v.SumVectors(
            parts=tuple(part.extent for part in parts),
            into=total.extent,
            elements=elements,
            rounding=rounding,
            rounded=None if written is None else written.extent,
            begin=shard.begin,
            markings=markings,
            robust=step.group > 0 and self._schema.robust,
            movements=step.group > 0 and self._codec.of_movements,
            closely=work.closely,
        )
        posted = self._posts.post(command, [*parts, total, written])

        async def answer() -> None:
            done = await posted
            lengths = self._proofs.received(step, work, done.marks, len(markings))
            if written is not None and done.rounded:
                self._is_coded(written, shard)
                total.written = written
            elif written is not None:
                self._store.release(written)
            if done.unsound:
                what = "parameters" if step.group else "gradients"
                self._store.release(total)
                self._perform(
                    self._member.work.unusable(step, shard, done.unsound[0], f"its {what} are not finite")
                )
            else:
                looks = [e.Look(digest, finite) for digest, finite in done.looks]
                self._perform(self._member.work.summed(step, shard, total, lengths, looks))

        return answer()

    def inspect(self, step: e.StepId, work: e.Inspect) -> Answer | None:
        """`Inspect` → `inspected`: add the uses of tied parameters to a block, and look at its gradient."""
        elements = self._schema.elements(work.block)
        shards = [shard for shard in work.shards if isinstance(shard, Tensor)]
        if sum(shard.extent.nbytes for shard in shards) != elements * FLOAT_BYTES:
            return None
        pieces = [piece for piece in work.pieces if isinstance(piece, Tensor)] if work.closely else []
        gradient, tied = self._store.whole(shards[0]), []
        if self._schema.ties.of(work.block) and not self._landed.has_added(step, work.plan, work.block):
            gradient = self._copy(step, gradient)
            tied = self._add_tied(work, shards[0], gradient)
        norms = self._norms(work.block)

        async def answer() -> None:
            for summed in tied:
                await summed
            command = v.InspectVector(
                extent=gradient.extent,
                elements=elements,
                pieces=tuple(piece.extent for piece in pieces),
                **norms,
            )
            seen = await self._posts.post(command, [gradient, *pieces])
            self._seen(step, work, seen, gradient)

        pinned = self._store.pin([gradient, *pieces])
        return _finally(answer(), lambda: self._store.unpin(pinned))

    def inspect_slot(self, step: e.StepId, work: e.InspectSlot) -> Answer:
        """`InspectSlot` → `inspected`."""
        block = work.block
        command = v.InspectSlot(step=step.number, block=block, slot=work.slot, **self._norms(block))
        posted = self._posts.post(command, ())

        async def answer() -> None:
            self._seen(step, work, await posted, e.SlotSum(work.slot))

        return answer()

    def land(self, step: e.StepId, work: e.Land) -> None:
        """Move a sum to its place in the block's vector."""
        self._landed.land(step, work)

    def end_step(self, step: e.StepId) -> None:
        """Forget `step`; what has landed is freed by the store."""
        self._landed.end_step(step)

    def _norms(self, block: int) -> dict[str, Any]:
        """The ranges of `block` that count for its norm, and for that of each group of parameters."""
        spec = self._schema.specs[block]
        patterns = [group.pattern for group in self._schema.training.groups]
        normed = self._schema.ties.counted(block, spec.parameter_count)
        return {"normed": normed, "groups": group_ranges(spec, patterns, normed)}

    def _seen(
        self, step: e.StepId, work: e.Inspect | e.InspectSlot, seen: r.Inspected, gradient: Tensor | e.SlotSum
    ) -> None:
        """The worker has inspected a block's sum: tell the core."""
        if not step.group:
            self._book.computed("inspect", seen.seconds)
        norm = seen.squared_norm if seen.finite else math.inf  # not NaN, which is no norm
        vote = m.BlockVote(
            block=work.block,
            digest=seen.digest,
            squared_norm=norm,
            finite=seen.finite,
            group_squares=seen.group_squares if seen.finite else (),
        )
        looks = [e.Look(digest, finite) for digest, finite in seen.pieces]
        self._perform(self._member.work.inspected(step, work.plan, vote, gradient, looks))

    def _copy(self, step: e.StepId, vector: Tensor) -> Tensor:
        copy = self._store.put(step, self._store.view(vector))
        self._store.release(vector)
        return copy

    def _add_tied(self, work: e.Inspect, own: Tensor, gradient: Tensor) -> list[Coroutine[Any, Any, Any]]:
        """The additions in progress of the uses of each tied parameter, into its place in `gradient`."""
        tied = {block: (piece.begin, piece.shards[0]) for block, piece in work.tied.items()}
        first: dict[int, tuple[int, Tensor]] = {
            block: (begin, shard)
            for block, (begin, shard) in ({work.block: (0, own)} | tied).items()
            if isinstance(shard, Tensor)
        }
        found = []
        for use, uses in self._schema.ties.of(work.block):
            parts = tuple(
                _elements(shard, one.begin - begin, one.end - begin)
                for one in uses
                for begin, shard in (first[one.block],)
            )
            command = v.SumVectors(
                parts=parts,
                into=_elements(gradient, use.begin, use.end),
                elements=use.end - use.begin,
            )
            found.append(self._posts.post(command, [gradient, *(shard for _, shard in first.values())]))
        return found

    def apply(self, step: e.StepId, work: e.ApplyUpdate | e.InstallAverage) -> Answer:
        """`ApplyUpdate` or `InstallAverage` → `Member.applied`."""
        command: v.Apply | v.Install
        given = work.total if isinstance(work, e.InstallAverage) else work.gradient
        assert isinstance(given, Tensor | e.SlotSum)
        extent = None if isinstance(given, e.SlotSum) else given.extent
        if isinstance(work, e.InstallAverage):
            assert extent is not None
            command = v.Install(
                block=work.block,
                total=extent,
                coefficient=work.coefficient,
                plan=work.plan,
                needed=work.needed,
            )
        else:
            command = v.Apply(
                block=work.block,
                gradient=extent,
                slot=given.slot if isinstance(given, e.SlotSum) else None,
                coefficient=work.coefficient,
                plan=work.plan,
                needed=work.needed,
                base=step.base_of(work.block),
                compensation=self._schema.training.compensation,
                batch=step.batch,
                workers=work.workers,
                microbatches=self._schema.microbatches,
                skipped=tuple(i for i in range(self._schema.microbatches) if i not in work.ids),
            )
        posted = self._posts.post(command, [given] if isinstance(given, Tensor) else ())

        async def answer() -> None:
            done = await posted
            if not step.group:
                self._book.computed("update", done.seconds)
            self._perform(self._member.applied(step, work.block, done.digest))

        return answer()


def _elements(tensor: Tensor, begin: int, end: int) -> Extent:
    """Place of the float32 elements [begin, end) from where `tensor` begins; it need not be so long."""
    return Extent(offset=tensor.extent.offset + begin * FLOAT_BYTES, nbytes=(end - begin) * FLOAT_BYTES)


async def _finally(work: Answer, then: Callable[[], None]) -> None:
    try:
        await work
    finally:
        then()
