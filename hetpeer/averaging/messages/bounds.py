"""Bounds on the messages of a volunteer in one run, from its manifest and the number of volunteers.

A bound is about twice what an honest volunteer of this version sends, plus SPARE bytes for fields of a later
version. It is checked on the bytes, before they are decoded: pydantic takes half a second for a MiB of small
entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetpeer.averaging.messages.from_volunteer import MOST_GIVEN, MOST_SHOWN, MOST_VOTED
from hetpeer.averaging.messages.message_fields import (
    MAX_EVENT,
    MAX_MESSAGE_BYTES,
    MOST_MARKS,
    MOST_NAMED,
    MOST_RECEIPTS,
)

SPARE = 1 << 12
"""Bytes of any message: its fixed fields, texts and voucher, and fields of a later version."""
HELD, CONTENTS, VOTED, ID, LOSS, HITS, PEER, GIVEN, MARK = 128, 64, 192, 5, 16, 24, 160, 320, 2304
"""Bytes of an entry at most: Held, Contents without ids, BlockVote, an id, a loss or hits with the id, a peer
with a number, Given, Mark. Received and Length take less than GIVEN.
"""
FEW_PEERS = 16
"""Volunteers that are assumed at least: some may have just left."""
FEW_ENTRIES = 1 << 10
"""Entries of a list that are allowed at least, for fields of a later version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageBounds:
    """A run: blocks of its model, microbatches of a step (trained and evaluated), ids of a gradient slot."""

    blocks: int
    microbatches: int
    slot: int
    checked: bool
    """Whether the run has spot checks; otherwise no fingerprints are asked for."""
    groups: int = 0
    """Parameter groups, each with a norm in a vote."""

    @property
    def hello(self) -> int:
        """Most bytes of a Hello, in which a volunteer that comes back names the states that it holds."""
        return SPARE + self.blocks * HELD

    def entries(self, peers: int) -> int:
        """Most entries of a list or table of a message, with `peers` volunteers in the run."""
        marks = max(MOST_SHOWN, MOST_GIVEN) if self.checked else 0
        return max(FEW_ENTRIES, 2 * self.blocks, 2 * self.microbatches, self._named(peers), marks)

    def most(self, peers: int) -> Mapping[str, int]:
        """Kind of message → most bytes, with `peers` volunteers in the run; SPARE for other kinds."""
        named = self._named(peers)
        votes = min(MOST_VOTED, self.blocks * named) * GIVEN
        bounds = {
            "hello": self.hello,
            "ready": SPARE + self.blocks * HELD,
            "applied": SPARE + self.blocks * HELD,
            "sealed": SPARE + self.blocks * (CONTENTS + 2 * self.slot * ID) + 2 * self.slot * LOSS,
            "evaluated": SPARE + self.microbatches * (LOSS + HITS),
            "vote": SPARE + self.blocks * (VOTED + (self.groups + 1) * LOSS) + 2 * votes,
            "missed": SPARE + 2 * MOST_NAMED * PEER,
            "compared": SPARE + 2 * MOST_NAMED * PEER,
            "checked": SPARE + self.blocks * LOSS,
            "shuns": SPARE + MOST_NAMED * PEER,
            "paced": SPARE + named * PEER,
            "event": SPARE + MAX_EVENT,
        }
        if self.checked:
            bounds |= {
                "proved": SPARE + 2 * MOST_MARKS * MARK,
                "testimony": SPARE + MOST_RECEIPTS * (MARK + PEER),
                "shown": SPARE + MOST_SHOWN * MARK + MOST_GIVEN * GIVEN,
            }
        return {kind: min(bound, MAX_MESSAGE_BYTES) for kind, bound in bounds.items()}

    def _named(self, peers: int) -> int:
        return max(FEW_PEERS, 2 * peers)
