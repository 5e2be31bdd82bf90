"""Bytes that the reduce of a step sends between volunteers: slots by the coordinator's division
(bootstrap/coordinator/reduction.py), and the holders' shards. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hetpeer.averaging.reduce.reduce_shards import shards_of
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs
from hetpeer.bootstrap.coordinator.reduction import divided
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.peer.transport.tensor_schema import FLOAT_BYTES
from hetpeer.stages.links.codec import Codec
from hetpeer.stages.pipeline.routes import Roster, Route


def sums_bytes(
    manifest: Manifest, routes: Mapping[int, Route], roster: Roster, uplinks: Mapping[str, float]
) -> dict[tuple[str, str], int]:
    """(from, to) → bytes of a step whose microbatches take `routes`; `uplinks` in bytes/s, 0 if unknown."""
    ties, codec = Ties(manifest.ties), Codec.of(manifest.links.reduce)
    sizes = {block.index: block.vector_count for block in manifest.blocks}
    sums = {block: _sums(block, routes) for block in sizes}
    partners = {block: ties.partners(block) for block in sizes}
    sent: defaultdict[tuple[str, str], int] = defaultdict(int)
    guarded = manifest.trust.spot_checks > 0
    for cover in divided(sums, roster, sizes, partners, uplinks, DisputedPairs(), guarded=guarded):
        for shard in shards_of(0, cover, sizes[cover.block]):
            count = shard.end - shard.begin
            nbytes = FLOAT_BYTES * count if codec.values is None else codec.values.nbytes(count)
            tied = ties.needed(shard.block, shard.begin, shard.end)
            readers = (*cover.receivers, *(cover.observers if tied else ()))
            pairs = [(holder, shard.reducer) for holder, _ in cover.slots]
            for pair in (*pairs, *((shard.reducer, reader) for reader in readers)):
                sent[pair] += nbytes
    return {(sender, to): nbytes for (sender, to), nbytes in sent.items() if sender != to}


def _sums(block: int, routes: Mapping[int, Route]) -> Sequence[tuple[str, tuple[int, ...]]]:
    """Peer → ids that it has computed at `block`."""
    ids: defaultdict[str, list[int]] = defaultdict(list)
    for number, route in sorted(routes.items()):
        for hop in route:
            if hop.begin <= block < hop.end:
                ids[hop.peer].append(number)
    return [(peer, tuple(held)) for peer, held in sorted(ids.items())]
