"""What peers may put into our arena: how much credit each of them is granted, and what they hold of it.

Half of the arena is for what comes from others: a quarter for activations, and one for their gradients. Of each, one half in equal parts for the volunteers
of the step, the other as they have sent lately what was of use here: of forty volunteers a few have the blocks next to ours, and most microbatches of a cluster come from one of them. Whatever that is, one largest frame of each pool always has room. Shards are
bounded by what a reduce needs of them. Who is no volunteer of the step may send one frame of each kind, which is what a
newcomer needs whose step has not begun here yet; and only a few such peers at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hetpeer.averaging.member.tensor_heads import ActivationHead, GradientHead, Head, ShardHead
from hetpeer.dht.streams.flow_control import Pool
from hetpeer.dht.streams.grants import GrantBudget, Grants, Holding
from hetpeer.peer.transport.link_pressure import ACTIVATIONS, GRADIENTS, SHARDS, pool_at
from hetpeer.peer.transport.tensor_schema import FLOAT_BYTES, TensorSchema
from hetpeer.stages.pipeline.routes import blocks_left

KINDS = 3
NOTHING = (GrantBudget(),) * KINDS
SHARE = 0.25
"""Of the arena, for the activations of all volunteers together, and as much for gradients."""
FADE = 0.5
"""Of what a volunteer has sent, with each step, and each time that somebody comes or goes."""
MOST_LATELY = 0.25
"""Of what is shared out by that, for one of more than five: nobody is to take it all by sending more than others."""
MAX_STRANGERS = 8
SLACK = 4096
"""Bytes; what an encoded bundle may be longer than the bundle itself, besides an eighth (positions of a sparse one)."""


def pool_of(head: Head) -> Pool:
    """Which pool of credit a tensor belongs to."""
    match head:
        case ActivationHead():
            return pool_at(blocks_left(head.route))
        case GradientHead():
            return GRADIENTS
        case _:
            return SHARDS


def cost_of(head: Head, nbytes: int, schema: TensorSchema, *, sending: bool) -> int:
    """Bytes that a tensor whose payload has `nbytes` takes at its receiver: an encoded one is decoded beside itself."""
    match head:
        case ActivationHead() if head.coded is not None:
            layout = schema.output_layout if sending else schema.input_layout
            return nbytes + layout(head.route[0].begin, head.id).nbytes
        case GradientHead() if head.coded is not None:
            layout = schema.input_layout if sending else schema.output_layout
            return nbytes + layout(head.border, head.id, gradients=True).nbytes
        case ShardHead() if head.coded is not None:
            return nbytes + (head.end - head.begin) * FLOAT_BYTES
        case _:
            return nbytes


class Intake:
    """The books of all peers that send to us."""

    def __init__(self) -> None:
        self._capacity = 0
        self._least = (0, 0, 0)
        self._reduce = 0
        self._pools = pool_at(0) + 1
        self._members: frozenset[str] = frozenset()
        self._holdings: dict[str, Holding] = {}
        self._links: dict[str, tuple[str, Grants]] = {}
        self._taken: dict[str, dict[Pool, float]] = {}
        """Volunteer of the step → bytes that were of use lately, by kind of pool."""

    def use(self, schema: TensorSchema | None, capacity: int) -> None:
        """Our place, and the bytes of the arena; without a place nobody is granted anything."""
        self._capacity = capacity if schema is not None else 0
        if schema is not None:
            self._least, self._reduce = _least(schema), _reduce_bytes(schema)
            self._pools = pool_at(schema.blocks - min(schema.specs)) + 1
        self._resize()

    def members(self, peers: Iterable[str], linked: Iterable[str]) -> None:
        """The volunteers of the step that begins. Others that have no link and no tensor here any more are forgotten, and what came long ago."""
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

    def grants(self, peer: str, key: str, announce: Callable[[], None]) -> Grants:
        """The books of the link that `peer` calls `key`, new ones for a new link."""
        known = self._links.get(peer)
        if known is None or known[0] != key:
            holding = self._holdings.setdefault(peer, Holding())
            grants = Grants(self._budgets(peer), self._pools, holding, announce)
            self._links[peer] = known = (key, grants)
        return known[1]

    def of_use(self, peer: str, head: Head, nbytes: int) -> None:
        """So much of `peer` was waited for here."""
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
    full = schema.training.microbatches
    ends = [schema.output_layout(block + 1, full, gradients=True).nbytes for block in schema.specs]
    begins = [schema.input_layout(block, full).nbytes for block in schema.specs]
    shards = [schema.elements(block) * FLOAT_BYTES for block in schema.observed]
    return _with_coded(max(ends)), _with_coded(max(shards)), _with_coded(max(begins))


def _with_coded(nbytes: int) -> int:
    return 2 * nbytes + nbytes // 8 + SLACK


def _reduce_bytes(schema: TensorSchema) -> int:
    """Bytes that one peer may have to send in a plan: its parts of all our shards, and all sums. Written by a codec they take up to half as
    much more.
    """
    return 3 * FLOAT_BYTES * sum(schema.elements(block) for block in schema.observed)
