"""Grants to peers: how many bytes each may put into our arena, and how many of its bytes are there.

A quarter of the arena is for activations of others and a quarter for their gradients. Half of each quarter is
divided equally between the volunteers of the step, the other half by how much of use they have sent lately:
of forty volunteers a few have the blocks next to ours, and most microbatches of a cluster come from one of
them. One largest frame of each pool always has room. Shards are bounded by what a reduce needs of them. A
peer that is not in the step may send one frame of each kind, which a late joiner needs whose step has not
begun here yet; and only a few such peers at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hetpeer.averaging.member.tensor_heads import Head
from hetpeer.dht.streams.flow_control import GrantBudget, HeldBytes, LinkGrants, Pool
from hetpeer.peer.transport.tensor_schema import FLOAT_BYTES, TensorSchema, pool_of
from hetpeer.peer.transport.uplink import ACTIVATIONS, GRADIENTS, pool_at

KINDS = 3
NOTHING = (GrantBudget(),) * KINDS
SHARE = 0.25
"""Share of the arena for the activations of all volunteers together, and again for gradients."""
FADE = 0.5
"""Factor of what a volunteer has sent, with each step and each time that a volunteer comes or goes."""
MOST_LATELY = 0.25
"""Share of that half for one of more than five volunteers, so that none gets it all by sending more."""
MAX_STRANGERS = 8
SLACK = 4096
"""Bytes by which an encoded bundle may exceed the bundle, besides an eighth for positions of a sparse one."""


class Intake:
    """The books of all peers that send to us."""

    def __init__(self) -> None:
        self._capacity = 0
        self._least = (0, 0, 0)
        self._reduce = 0
        self._pools = pool_at(0) + 1
        self._members: frozenset[str] = frozenset()
        self._holdings: dict[str, HeldBytes] = {}
        self._links: dict[str, tuple[str, LinkGrants]] = {}
        self._taken: dict[str, dict[Pool, float]] = {}
        """Volunteer of the step → bytes that were of use lately, by kind of pool."""

    def use(self, schema: TensorSchema | None, capacity: int) -> None:
        """Our place and the bytes of the arena; without a place there are no grants."""
        self._capacity = capacity if schema is not None else 0
        if schema is not None:
            self._least, self._reduce = _least(schema), _reduce_bytes(schema)
            self._pools = pool_at(schema.blocks - min(schema.specs)) + 1
        self._resize()

    def members(self, peers: Iterable[str], linked: Iterable[str]) -> None:
        """`peers` are the volunteers of the step that begins. Forget other peers without a `linked` channel
        or a tensor here.

        What was sent long ago counts less from now on.
        """
        self._members = frozenset(peers)
        kept = self._members.union(linked, (p for p, h in self._holdings.items() if h.held.total()))
        for gone in self._holdings.keys() - kept:
            del self._holdings[gone]
            self._links.pop(gone, None)
        self._taken = {
            peer: {kind: nbytes * FADE for kind, nbytes in taken.items()}
            for peer, taken in self._taken.items()
            if peer in self._members
        }
        self._resize()

    def grants(self, peer: str, key: str, announce: Callable[[], None]) -> LinkGrants:
        """The books of the link that `peer` calls `key`, new ones for a new link."""
        known = self._links.get(peer)
        if known is None or known[0] != key:
            holding = self._holdings.setdefault(peer, HeldBytes())
            grants = LinkGrants(self._budgets(peer), self._pools, holding, announce)
            self._links[peer] = known = (key, grants)
        return known[1]

    def of_use(self, peer: str, head: Head, nbytes: int) -> None:
        """A tensor of `peer` of `nbytes` was waited for here."""
        kind = min(pool_of(head), ACTIVATIONS)
        taken = self._taken.setdefault(peer, {})
        taken[kind] = taken.get(kind, 0.0) + nbytes

    def held(self) -> int:
        """Bytes that tensors of peers take here."""
        return sum(holding.held.total() for holding in self._holdings.values())

    def _resize(self) -> None:
        for peer, (_, grants) in self._links.items():
            grants.resize(self._budgets(peer), self._pools)

    def _budgets(self, peer: str) -> tuple[GrantBudget, ...]:
        """Grants for `peer`: its share of memory, the least for a stranger, nothing beyond MAX_STRANGERS."""
        if not self._capacity:
            return NOTHING
        if peer not in self._members:
            strangers = [other for other in self._holdings if other not in self._members]
            few = peer in strangers[:MAX_STRANGERS]
            return tuple(GrantBudget(least, least) for least in self._least) if few else NOTHING
        gradient, shard, activation = self._least
        return (
            GrantBudget(gradient, max(gradient, self._share(peer, GRADIENTS))),
            GrantBudget(shard, max(shard, self._reduce)),
            GrantBudget(activation, max(activation, self._share(peer, ACTIVATIONS))),
        )

    def _share(self, peer: str, kind: Pool) -> int:
        """Bytes that a volunteer of the step may have here of pools of that kind."""
        equal = 1 / max(1, len(self._members) - 1)
        taken = {one: known.get(kind, 0.0) for one, known in self._taken.items() if one in self._members}
        lately = taken.get(peer, 0.0) / total if (total := sum(taken.values())) else equal
        if equal < MOST_LATELY:
            lately = min(lately, MOST_LATELY)
        return int(self._capacity * SHARE * (equal + lately) / 2)


def _least(schema: TensorSchema) -> tuple[int, int, int]:
    """Bytes of the largest frame of each kind."""
    full = schema.microbatches
    ends = [schema.output_layout(block + 1, full, gradients=True).nbytes for block in schema.specs]
    begins = [schema.input_layout(block, full).nbytes for block in schema.specs]
    shards = [schema.elements(block) * FLOAT_BYTES for block in schema.observed]
    return _with_coded(max(ends)), _with_coded(max(shards)), _with_coded(max(begins))


def _with_coded(nbytes: int) -> int:
    return 2 * nbytes + nbytes // 8 + SLACK


def _reduce_bytes(schema: TensorSchema) -> int:
    """Bytes that one peer may have to send in a plan: its parts of all our shards, and all sums.

    Written by a codec they take up to half as much more.
    """
    return 3 * FLOAT_BYTES * sum(schema.elements(block) for block in schema.observed)
