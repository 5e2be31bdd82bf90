"""Moves of blocks in a running swarm: what each one promised, what came, and what that asks of the next one.

Pure. All of it follows from the log (`arranged` has the promise, `moved` the result), so that a new
coordinator asks for as much as the one before it. Docs: planning.md, "A move pays for itself".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Annotated, Final

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import unpack

if TYPE_CHECKING:
    from hetpeer.bootstrap.log.history import History

KEPT: Final = 16
"""Newest moves that are remembered and served."""
MAX_BYTES: Final = 1 << 13
FULL_STEPS = 2
"""Least full steps behind a measured step time."""
RECENT_STEPS = 5
"""Newest full steps whose median it is."""
RECENT_MOVES = 5
"""Newest moves whose median cost counts."""
JUDGED = 0.05
"""Least fraction of a step that a move must promise for its gain to be judged."""
LEAST_COST, MOST_COST = 0.5, 20.0
"""Bounds of the measured cost of moves, as a multiple of the foreseen one."""
MOST_DEMAND = 4.0
"""Most that is asked of a gain, as a multiple of what is asked if promises were kept."""
FORGIVEN = 100
"""Steps in which half of what is asked beyond that is dropped."""

Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**53)]


class MovePromise(BaseModel):
    """Expectation of a move. Seconds of a step before and after it, and of the move itself."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    before_s: Seconds | None
    """As measured; None: no step could run."""
    after_s: Seconds
    moving_s: Seconds
    """Seconds without training, as foreseen times `costs`."""
    costs: Seconds = 1.0
    """Measured over foreseen cost of the moves before this one."""
    blocks: Count
    """Blocks that volunteers fetch. 0: the same holders become other pipelines."""

    @property
    def shortens(self) -> bool:
        """Whether steps are to become so much shorter that it can be judged by them."""
        return self.before_s is not None and self.before_s - self.after_s >= JUDGED * self.before_s


class MoveResult(BaseModel):
    """Outcome of a move, measured; or the reason why nothing was compared."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    after_s: Seconds | None = None
    """Median of the steps after the first one; None: they were not comparable."""
    moving_s: Seconds | None = None
    """Seconds from the last step before the move to the next, and by which that one took longer."""
    why: Annotated[str, Field(max_length=200)] = ""
    """Reason why it was not compared."""


class Move(BaseModel):
    """One move. `result` is None until it has settled."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    step: Count
    """First step at the new places."""
    promise: MovePromise
    result: MoveResult | None = None

    @property
    def kept(self) -> float | None:
        """Gain that came, as a multiple of the promised one; below 0 if steps got longer. None: not known."""
        before_s, after_s = self.promise.before_s, None if self.result is None else self.result.after_s
        if before_s is None or after_s is None or not self.promise.shortens:
            return None  # a move for steadier holders may promise nothing of a step
        return (before_s - after_s) / (before_s - self.promise.after_s)

    @property
    def costs(self) -> float | None:
        """Measured over foreseen cost; None: not known."""
        if self.result is None or self.result.moving_s is None or not self.promise.moving_s:
            return None
        return self.result.moving_s / self.promise.moving_s * self.promise.costs


def cost_factor(moves: Sequence[Move]) -> float:
    """Factor between foreseen and measured cost of this run's moves; 1 before the first."""
    known = [move.costs for move in moves if move.costs is not None][-RECENT_MOVES:]
    return min(max(median(known), LEAST_COST), MOST_COST) if known else 1.0


def demand(moves: Iterable[Move], step: int) -> float:
    """Factor by which a gain must exceed its usual least, at `step`; 1 if promises were kept.

    A gain of which a third came makes it 3. Each promise that is kept takes the square root of it, and every
    FORGIVEN steps half of what is beyond 1 is dropped: a swarm changes, and one bad figure is no verdict.
    """
    asked, since = 1.0, 0
    for move in moves:
        kept = move.kept
        if kept is not None:
            asked = math.sqrt(_forgiven(asked, move.step - since))
            asked = max(asked, min(1.0 / max(kept, 1.0 / MOST_DEMAND), MOST_DEMAND))
            since = move.step
    return _forgiven(asked, step - since)


def _forgiven(asked: float, steps: int) -> float:
    return 1.0 + (asked - 1.0) * math.exp2(-max(steps, 0) / FORGIVEN)


def measured_step_s(history: History, since: int) -> float | None:
    """Median seconds of the newest steps after `since`, the one under way when the swarm changed last.

    None before FULL_STEPS of them are committed.
    """
    known = [float(c["seconds"]) for step, c in history.commits.items() if step > since and "seconds" in c]
    return median(known[-RECENT_STEPS:]) if len(known) >= FULL_STEPS else None


def encode(moves: Sequence[Move]) -> bytes:
    """The newest moves as msgpack."""
    data: bytes = msgpack.packb([move.model_dump() for move in moves[-KEPT:]])
    return data


def decode(data: bytes | bytearray, peer: str) -> tuple[Move, ...]:
    """The moves in an answer of `peer`. Raises `ProtocolError` if there are none."""
    plain = unpack(data, "moves of blocks", peer)
    try:
        return _Moves.model_validate({"moves": plain}).moves
    except ValidationError as error:
        raise ProtocolError("moves of blocks that are none", peer=peer) from error


class _Moves(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    moves: Annotated[tuple[Move, ...], Field(max_length=KEPT, strict=False)]
