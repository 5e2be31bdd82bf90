"""The arena: shared memory through which tensors pass between daemon and compute worker.

Both processes map one sparse memfd. The daemon receives an activation from the network straight into an
extent, the worker computes on that extent, and only the extent's two numbers cross the socket. A memfd has no
name, so nothing is left behind when both are killed. Only the daemon decides what lies where (`Arena`, with a
first-fit `FreeList`); the worker only maps (`SharedMemory`).

A bundle's tensors follow one another in one extent in the order of the block's spec, each at a multiple of 64
bytes, so that each can be used where it lies (`BundleLayout`); on the wire they lie the same way. Gradients
of a bundle are laid out likewise, without the tensors that have none.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from hetpeer.dht.base.errors import ExitCode, LocalError, ProtocolError
from hetpeer.stages.graph.block_spec import ITEM_BYTES, TensorSpec
from hetpeer.stages.links.codec import FLOATING, Codec, EncodedTensor, kept_of, length, room

Bytes = Annotated[int, Field(ge=0, lt=1 << 62, strict=True)]
ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load of a CPU kernel."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A place in the arena: `nbytes` bytes from byte `offset`."""

    offset: Bytes
    nbytes: Bytes


class ArenaFullError(LocalError):
    """No free piece of the arena is long enough. Nothing was changed."""

    def __init__(self, wanted: int, used: int, capacity: int, largest: int) -> None:
        super().__init__(
            "HP-MEM-001",
            f"no room for {_mib(wanted)} in the memory shared with the compute worker",
            why=f"{_mib(used)} of {_mib(capacity)} are in use and the largest free piece has {_mib(largest)}",
            fix="allow hetpeer more memory, or take part with fewer blocks",
            exit_code=ExitCode.TOO_SMALL,
        )


class FreeList:
    """First-fit allocation of aligned ranges with coalescing: pure bookkeeping of numbers, no memory.

    `_begins` and `_ends` are the free ranges in ascending order; no two of them touch.
    """

    def __init__(self, capacity: int) -> None:
        self._begins = [0] if capacity else []
        self._ends = [capacity] if capacity else []

    @property
    def largest(self) -> int:
        """Bytes of the longest free range."""
        return max((end - begin for begin, end in self.ranges()), default=0)

    def ranges(self) -> list[tuple[int, int]]:
        """The free ranges as (begin, end), ascending."""
        return list(zip(self._begins, self._ends, strict=True))

    def take(self, size: int) -> int | None:
        """Cut `size` bytes off the first range that is long enough; None if there is none."""
        for index, (begin, end) in enumerate(zip(self._begins, self._ends, strict=True)):
            if end - begin >= size:
                if end - begin == size:
                    del self._begins[index], self._ends[index]
                else:
                    self._begins[index] = begin + size
                return begin
        return None

    def give(self, begin: int, size: int) -> None:
        """Return a taken range and join it with its free neighbours."""
        end = begin + size
        index = bisect.bisect_left(self._begins, begin)
        if index < len(self._begins) and self._begins[index] == end:
            end = self._ends[index]
            del self._begins[index], self._ends[index]
        if index > 0 and self._ends[index - 1] == begin:
            self._ends[index - 1] = end
        else:
            self._begins.insert(index, begin)
            self._ends.insert(index, end)


class SharedMemory:
    """A mapping of the arena's memfd. `close` unmaps it and closes the descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.capacity = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.capacity, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)

    def view(self, extent: Extent) -> memoryview:
        """The extent's bytes, writable, without a copy. Raises ValueError if it leaves the arena."""
        end = extent.offset + extent.nbytes
        if extent.offset < 0 or extent.nbytes < 0 or end > self.capacity:
            raise ValueError(f"{extent} is outside an arena of {self.capacity} bytes")
        return memoryview(self._map)[extent.offset : end]

    def discard(self, begin: int, size: int) -> None:
        """Return the whole pages inside a range to the system: they cost nothing and read as zeros."""
        first = _round_up(begin, mmap.PAGESIZE)
        end = (begin + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._map.madvise(mmap.MADV_REMOVE, first, end - first)

    def close(self) -> None:
        """Unmap and close. The pages live on while a tensor or a send under way holds a view of them."""
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # views are left: the mapping is freed with the last of them
            self._map.close()


def _shared(capacity: int) -> SharedMemory:
    """New shared memory of `capacity` bytes. Raises OSError, and leaves nothing then."""
    fd = os.memfd_create("hetpeer-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, capacity)
        # A faulty worker could otherwise shrink the file, and the daemon would die of SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return SharedMemory(fd)
    except OSError:
        os.close(fd)
        raise


def no_shared_memory(error: OSError) -> LocalError:
    """HP-SYS-004."""
    return LocalError(
        "HP-SYS-004",
        "no memory can be shared between daemon and compute worker",
        why=f"the system gives none: {error.strerror}",
        fix="allow memfd_create in the sandbox or container that this runs in, and enough address space"
        " (ulimit -v); or offer less, --ram-limit",
    )


class Arena:
    """The daemon's side: a memfd and the extents allocated in it.

    arena = Arena(1 << 30)
    extent = arena.allocate(4096)
    arena.view(extent)[:4] = b"data"
    arena.release(extent)
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` in bytes is rounded up to whole pages. Unwritten pages cost no memory.

        Raises `LocalError` HP-SYS-004.
        """
        capacity = _round_up(capacity, mmap.PAGESIZE)
        try:
            self.memory = _shared(capacity)
        except OSError as error:
            raise no_shared_memory(error) from error
        self.view = self.memory.view
        self._free = FreeList(capacity)
        self._taken: dict[Extent, int] = {}  # reserved bytes: the extent's size rounded up
        self.used = 0
        """Bytes reserved, including alignment."""
        self._reach = 0  # no byte from here on was allocated since the last `trim`
        self._filled = 0  # bytes that were reserved at the last `trim`, or since then

    def __repr__(self) -> str:
        return f"<Arena {_mib(self.used)} of {_mib(self.capacity)} in {len(self._taken)} extents>"

    @property
    def fd(self) -> int:
        """The memfd, for the child process to inherit."""
        return self.memory.fd

    @property
    def capacity(self) -> int:
        """Size in bytes."""
        return self.memory.capacity

    @property
    def held(self) -> int:
        """Most bytes of memory that the arena's pages take now, free ones included."""
        return max(min(self._filled, self._reach), self.used)

    def allocate(self, nbytes: int) -> Extent:
        """Reserve `nbytes` bytes at a multiple of 64; their content is undefined. Raises `ArenaFullError`."""
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        size = _round_up(max(nbytes, 1), ALIGNMENT)
        offset = self._free.take(size)
        if offset is None:
            raise ArenaFullError(nbytes, self.used, self.capacity, self._free.largest)
        extent = Extent(offset, nbytes)
        self._taken[extent] = size
        self.used += size
        self._filled += size
        self._reach = max(self._reach, offset + size)
        return extent

    def release(self, extent: Extent, *, pages: bool = False) -> None:
        """Free an extent; its views must not be used any more. Raises ValueError if it is not allocated.

        Its pages stay for the next allocation: zeroed pages for every step's tensors cost 5 % of the step.
        With `pages` they go back to the system.
        """
        size = self._taken.pop(extent, None)
        if size is None:
            raise ValueError(f"{extent} is not allocated")
        self.used -= size
        self._free.give(extent.offset, size)
        if pages:
            self.memory.discard(extent.offset, size)
            self._filled -= size

    def trim(self) -> None:
        """Return the pages of all free ranges to the system. Call it after a peak, or now and then."""
        for begin, end in self._free.ranges():
            self.memory.discard(begin, min(end, self._reach) - begin)
        self._reach = max((extent.offset + size for extent, size in self._taken.items()), default=0)
        self._filled = self.used

    def close(self) -> None:
        """Unmap. All extents end with it."""
        self.memory.close()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True)
class BundleLayout:
    """Name → (offset, bytes) within a piece of `nbytes` bytes; name → dtype."""

    places: Mapping[str, tuple[int, int]]
    nbytes: int
    dtypes: Mapping[str, str] = field(default_factory=dict)
    width: float = field(init=False)
    """Bytes of its narrowest floating-point number; 0 if it has none."""

    def __post_init__(self) -> None:
        widths = (ITEM_BYTES[dtype] for dtype in self.dtypes.values() if dtype in FLOATING)
        object.__setattr__(self, "width", float(min(widths, default=0)))

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec], *, gradients: bool = False) -> BundleLayout:
        """The layout of the tensors of `specs`, or of their gradients."""
        places: dict[str, tuple[int, int]] = {}
        dtypes: dict[str, str] = {}
        offset = 0
        for name, spec in specs.items():
            if gradients and not spec.grad:
                continue
            places[name], dtypes[name] = (offset, spec.nbytes), spec.dtype
            offset += _round_up(spec.nbytes, ALIGNMENT)
        return cls(places, offset, dtypes)

    def within(self, extent: Extent) -> dict[str, Extent]:
        """The extent of each tensor if the bundle lies at `extent`."""
        return {
            name: Extent(offset=extent.offset + offset, nbytes=nbytes)
            for name, (offset, nbytes) in self.places.items()
        }

    def tensors(self, extent: Extent) -> tuple[tuple[str, Extent], ...]:
        """(dtype, extent) of each tensor, in order, if the bundle lies at `extent`."""
        return tuple((self.dtypes[name], place) for name, place in self.within(extent).items())

    # ── written by a codec ─────────────────────────────────────────────────────────────────────────────────

    def room(self, codec: Codec, share: float) -> int:
        """Most bytes of the encoded bundle, if `share` of each tensor is kept."""
        return sum(room(codec, dtype, count, kept_of(count, share)) for dtype, count in self._counted())

    def written(self, codec: Codec, written: Sequence[EncodedTensor]) -> int:
        """Bytes of the encoded bundle, by its head. Raises `ProtocolError` for an impossible head."""
        if len(written) != len(self.places):
            raise ProtocolError(f"{len(written)} encoded tensors for a bundle of {len(self.places)}")
        return sum(
            length(codec, dtype, count, one)
            for one, (dtype, count) in zip(written, self._counted(), strict=True)
        )

    def _counted(self) -> list[tuple[str, int]]:
        """(dtype, elements) of each tensor."""
        return [
            (self.dtypes[name], nbytes // ITEM_BYTES[self.dtypes[name]])
            for name, (_, nbytes) in self.places.items()
        ]
