"""The tensors that a volunteer keeps in the arena.

Tensors are the protocol core's handles. Each belongs to one step and lives until the core releases it or the
step ends. A tensor that the compute worker still reads or writes is pinned (worker_posts.py does that), one
on its way to a peer is in flight: its memory is freed only afterwards, or a stale command could write into
another tensor. A tensor that is kept only in case it is asked for again goes to the spill file when the
arena is full, or as full as the owner's limit allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hetpeer.averaging.effects import StepId
from hetpeer.dht.channels.channel import Parcel
from hetpeer.peer.transport.spill_file import SpillFile
from hetpeer.stages.ipc.arena import Arena, ArenaFullError, Extent

TRIM_STEPS = 64
"""Steps after which the arena's free pages go back to the system, so that no peak is kept for ever."""
TRIM_BYTES = 4 << 20
"""Least bytes of free pages that go back where the limit is reached: fewer are not worth new page faults."""


@dataclass(eq=False, slots=True)
class Tensor:
    """A bundle of activations, its gradient, or a piece of a flat gradient, as bytes in the arena."""

    extent: Extent
    """Place in the arena; meaningless while the tensor is parked."""
    step: StepId
    pins: int = 0
    flights: int = 0
    """Links on which its bytes are, or wait for their turn."""
    parked: Extent | None = None
    """Place in the spill file, if the tensor is there and not in the arena."""
    released: bool = False
    length: int | None = None
    """Bytes that mean something, where that is not all of the extent."""
    sparse: bool = False
    """Whether its zeros stand for what a codec left out."""
    coded: bool = False
    """Whether the tensor is a shard as the run's codec writes it."""
    written: Tensor | None = None
    """The same numbers as the run's codec writes them: others get these."""
    once: bool = False
    """Whether the tensor is not needed any more once it has arrived."""
    sender: str = ""
    """The peer that the tensor came from."""
    within: Extent | None = None
    """The larger extent of which this one is a part, and with which it is freed."""

    @property
    def nbytes(self) -> int:
        """Bytes of the extent that are used."""
        return self.extent.nbytes if self.length is None else self.length

    @property
    def memory(self) -> Extent:
        """The extent that is freed with the last tensor in it."""
        return self.within or self.extent


class TensorStore:
    """Allocates tensors in `arena` and frees them step by step; what is kept may go to `spill`."""

    def __init__(self, arena: Arena, spill: SpillFile) -> None:
        self.limit = arena.capacity
        """Bytes of the arena that tensors may take, without sums (`keep_within`)."""
        self._sums: set[Extent] = set()
        """Extents for the sums of a reduce, for which the place has room."""
        self._arena = arena
        self._spill = spill
        self._steps: dict[StepId, set[Tensor]] = {}
        self._kept: dict[Tensor, None] = {}
        """Tensors that may be parked when they are not in use, the oldest first."""
        self._sharers: Counter[Extent] = Counter()
        """Extent → its owners beside the first."""
        self._lent: dict[Extent, Callable[[], None]] = {}
        """Extent → callback once its memory is free (`lend`)."""
        self._ended = 0

    def keep_within(self, nbytes: int) -> None:
        """Park kept tensors beyond `nbytes` of the arena, and give free pages beyond them back to the system.

        Tensors that cannot go stay, and nothing waits.
        """
        self.limit = min(nbytes, self._arena.capacity)

    def new(self, step: StepId, nbytes: int, *, kept: bool = False) -> Tensor:
        """Room for a tensor of `step`, `kept` in case it is asked for again. Raises ArenaFullError."""
        return self._tensor(step, self._allocate(nbytes, nbytes), kept=kept)

    def _tensor(self, step: StepId, extent: Extent, *, kept: bool = False) -> Tensor:
        tensor = Tensor(extent, step)
        self._steps.setdefault(step, set()).add(tensor)
        if kept:
            self._kept[tensor] = None
        return tensor

    def new_sum(self, step: StepId, nbytes: int) -> Tensor:
        """Room for a block's sum, which counts for no limit here: the place has it. Raises ArenaFullError."""
        extent = self._allocate(nbytes, 0)
        self._sums.add(extent)
        return self._tensor(step, extent)

    def put(self, step: StepId, data: memoryview) -> Tensor:
        """A tensor of `step` that holds a copy of `data`. Raises ArenaFullError."""
        tensor = self.new(step, data.nbytes)
        self._arena.view(tensor.extent)[:] = data
        return tensor

    def share(self, tensor: Tensor) -> Tensor:
        """Same memory with one more owner, freed by the last release. It must not be written to any more."""
        return self._one_more(
            Tensor(
                tensor.extent,
                tensor.step,
                length=tensor.length,
                sparse=tensor.sparse,
                coded=tensor.coded,
                within=tensor.within,
            )
        )

    def whole(self, part: Tensor) -> Tensor:
        """All of the memory that `part` lies in, with one more owner."""
        return self._one_more(Tensor(part.memory, part.step))

    def _one_more(self, owner: Tensor) -> Tensor:
        self._sharers[owner.memory] += 1
        self._steps.setdefault(owner.step, set()).add(owner)
        return owner

    def land(self, tensor: Tensor, into: Extent, offset: int) -> None:
        """Move `tensor`, which is not in use, into an extent from byte `offset` on, and make it an owner."""
        place = Extent(into.offset + offset, tensor.extent.nbytes)
        self._arena.view(place)[:] = self._arena.view(tensor.extent)
        self.settle(tensor, into, place)

    def settle(self, tensor: Tensor, into: Extent, place: Extent) -> None:
        """Free the memory of `tensor`, which is not in use, and make it an owner of `into`.

        Its numbers are at `place` there.
        """
        assert not tensor.pins
        assert not tensor.flights
        self._free(tensor.memory)
        self._sharers[into] += 1
        tensor.extent, tensor.within = place, into

    def lend(self, tensor: Tensor, back: Callable[[], None]) -> None:
        """`back` is called when the memory of `tensor` is free again."""
        self._lent[tensor.extent] = back

    def hand_on(self, tensor: Tensor, other: Tensor) -> None:
        """Pass what was lent to `tensor` on to `other`, which was made from it."""
        other.sender = tensor.sender
        if tensor.extent in self._lent:
            self._lent[other.extent] = self._lent.pop(tensor.extent)

    def view(self, tensor: Tensor) -> memoryview:
        """The bytes of `tensor`, which must not be parked."""
        assert tensor.parked is None
        return self._arena.view(tensor.extent)[: tensor.length]

    def release(self, tensor: Tensor) -> None:
        """Free `tensor` once it is not in use. A second release is no error: a step's end releases all."""
        if tensor.released:
            return
        tensor.released = True
        if tensor.written is not None:
            self.release(tensor.written)
        self._kept.pop(tensor, None)
        left = self._steps.get(tensor.step, set())
        left.discard(tensor)
        if not left:
            self._steps.pop(tensor.step, None)
        if tensor.parked is not None:
            self._drop_parked(tensor)
        else:
            self._let_go(tensor)

    def release_all(self, tensors: Iterable[Tensor]) -> None:
        """Release each of them."""
        for tensor in tensors:
            self.release(tensor)

    def end_step(self, step: StepId) -> None:
        """Release every tensor of `step`."""
        self.release_all(list(self._steps.pop(step, ())))
        self._ended += 1
        if self._ended % TRIM_STEPS == 0:
            self._arena.trim()

    def close(self) -> None:
        """Close the spill file; what is parked is lost."""
        self._spill.close()

    # ── in use ──────────────────────────────────────────────────────────────────────────────────────────────

    def pin(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Keep the memory of `tensors` in place until `unpin`, even if they are released meanwhile."""
        held = tuple(tensors)
        for tensor in held:
            assert tensor.parked is None
            tensor.pins += 1
        return held

    def unpin(self, tensors: Iterable[Tensor]) -> None:
        """Undo `pin`: free the memory of those that were released meanwhile."""
        for tensor in tensors:
            tensor.pins -= 1
            self._let_go(tensor)

    def leaves(self, tensor: Tensor) -> Callable[[], None]:
        """Note that the bytes of `tensor` go to a peer; the caller calls the result when that is over."""
        tensor.flights += 1

        def done() -> None:
            tensor.flights -= 1
            if tensor.released:
                self._let_go(tensor)
            elif tensor.once and not tensor.flights:
                self.release(tensor)

        return done

    def depart(self, tensor: Tensor, parcel: Parcel) -> Parcel | None:
        """`parcel` with `tensor` as its payload; None while there is no room to bring it back."""
        try:
            self.bring_back(tensor)
        except ArenaFullError:
            return None
        free = self.leaves(tensor)

        def done() -> None:
            free()
            if parcel.done is not None:
                parcel.done()

        return replace(parcel, payload=(self.view(tensor),), done=done)

    # ── on the disk ─────────────────────────────────────────────────────────────────────────────────────────

    def bring_back(self, tensor: Tensor) -> None:
        """Move `tensor` from the spill file back to the arena, if it is parked. Raises ArenaFullError."""
        if tensor.parked is None or tensor.released:
            return
        extent = self._allocate(tensor.parked.nbytes, tensor.parked.nbytes)
        self._spill.get(tensor.parked, self._arena.view(extent))
        self._drop_parked(tensor)
        tensor.extent = extent
        self._kept[tensor] = None  # the youngest now

    def _allocate(self, nbytes: int, counted: int) -> Extent:
        """Memory in the arena, of which so many bytes count for the limit; parks kept tensors, oldest first.

        Raises ArenaFullError.
        """
        self._keep_within(counted)
        held = self._arena.held
        if held + counted > self._most and held - self._arena.used >= TRIM_BYTES:
            self._arena.trim()
        try:
            return self._arena.allocate(nbytes)
        except ArenaFullError:
            for tensor in list(self._kept):
                if self._park(tensor):
                    try:
                        return self._arena.allocate(nbytes)
                    except ArenaFullError:
                        continue  # one more
            raise

    @property
    def _most(self) -> int:
        """Bytes that the arena may take now."""
        return self.limit + sum(extent.nbytes for extent in self._sums)

    def _keep_within(self, nbytes: int) -> None:
        """Park kept tensors until `nbytes` more are within the limit, as far as they can go."""
        if self._arena.used + nbytes <= self._most or self._spill.refusal:
            return
        for tensor in list(self._kept):
            if self._park(tensor) and self._arena.used + nbytes <= self._most:
                return

    def _park(self, tensor: Tensor) -> bool:
        """Move `tensor` to the spill file; False if it is in use or there is no room."""
        if tensor.pins or tensor.flights or self._sharers[tensor.memory]:
            return False
        place = self._spill.put(self._arena.view(tensor.extent))
        if place is None:
            return False
        tensor.parked = place
        del self._kept[tensor]
        self._free(tensor.extent)
        return True

    def _drop_parked(self, tensor: Tensor) -> None:
        """Free the tensor's place in the spill file."""
        assert tensor.parked is not None
        self._spill.drop(tensor.parked)
        tensor.parked = None

    def _let_go(self, tensor: Tensor) -> None:
        """Free the memory of `tensor` if it is released and not in use."""
        if tensor.released and not tensor.pins and not tensor.flights:
            self._free(tensor.memory)

    def _free(self, extent: Extent) -> None:
        """Take one owner from `extent`; with the last one free its memory and tell its lender."""
        if self._sharers[extent]:
            self._sharers[extent] -= 1
            return
        del self._sharers[extent]
        self._arena.release(extent, pages=extent in self._sums)  # a large one, once a step
        self._sums.discard(extent)
        if (back := self._lent.pop(extent, None)) is not None:
            back()
