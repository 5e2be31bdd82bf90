"""Predicted step time of a running swarm, from the volunteers' adverts about workers and links. Pure.

Adverts are claims: a prediction informs people and decides nothing. `reduce_bytes` counts what the reduce of
a step sends, by the coordinator's own division of it (bootstrap/coordinator/reduction.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hetpeer.averaging.reduce.reduce_shards import shards_of
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.bootstrap.conduct.disputed_pairs import DisputedPairs
from hetpeer.bootstrap.coordinator.reduction import divided
from hetpeer.bootstrap.run.manifest import Manifest, SignedManifest
from hetpeer.bootstrap.state.work_shares import leaving
from hetpeer.dht.base.errors import ExitCode, LocalError, short_id
from hetpeer.dht.discovery import Advert, LinkNote
from hetpeer.peer.planning.advert_lines import lines_of, uplink_of
from hetpeer.peer.transport.tensor_schema import FLOAT_BYTES
from hetpeer.peer.watching.status_summary import HOLDING
from hetpeer.stages.links.codec import Codec
from hetpeer.stages.pipeline.routes import LinkCosts, Roster, Route, assign_routes
from hetpeer.stages.planning.pair_lines import believed
from hetpeer.stages.planning.step_estimate import StepEstimate, estimate
from hetpeer.stages.planning.uplinks import PeerLink
from hetpeer.stages.planning.virtual_swarm import VirtualVolunteer

SCHEMA = "hetpeer.plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedVolunteer:
    """A volunteer on whose work a step waits."""

    peer: str
    name: str
    blocks: tuple[int, int]
    """[begin, end)."""
    computing: float
    """The part of a step in which its worker computes, 0…1."""
    sending: float
    """The part of a step in which its uplink carries something, 0…1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Estimate for the present swarm."""

    run: str
    estimate: StepEstimate
    measured_s: float | None
    """Seconds of the last step, by the coordinator's speed."""
    members: tuple[PredictedVolunteer, ...]
    fresh_steps: int = 0
    """The run's first steps, which do not overlap and are not predicted."""

    def document(self) -> dict[str, Any]:
        """The object of `--json`."""
        what, peer = self.estimate.bottleneck
        return {
            "schema": SCHEMA,
            "run": self.run,
            "predicted_s": self.estimate.seconds,
            "between_s": self.estimate.between_s,
            "staleness": self.estimate.staleness,
            "fresh_steps": self.fresh_steps,
            "measured_s": self.measured_s,
            "bottleneck": {"what": what, "peer": peer},
            "members": [asdict(member) for member in self.members],
        }


def predict(signed: SignedManifest, adverts: Mapping[str, Advert]) -> Prediction:
    """Predict a step of the volunteers at work (`adverts` by peer id).

    Raises `LocalError` HP-PLAN-001 while a block has no holder, or a holder has no measurements yet.
    """
    manifest = signed.manifest
    working = {
        peer: advert
        for peer, advert in sorted(adverts.items())
        if advert.role == "volunteer" and advert.state in HOLDING and advert.block_begin < advert.block_end
    }
    routes = _routes(manifest, working)
    taking_part = {hop.peer: working[hop.peer] for route in routes.values() for hop in route}
    machines = {
        peer: VirtualVolunteer(
            forward_s=advert.forward_s,
            backward_s=advert.backward_s,
            varies=advert.varies,
            update_s=advert.update_s,
            uplink=uplink_of(advert) or math.inf,
        )
        for peer, advert in taking_part.items()
    }
    between = min((a.between_s for a in taking_part.values() if a.between_s), default=0.0)
    lines = _lines(manifest, routes, taking_part, machines)
    delays = None if manifest.training.last_staleness is None else manifest.delays
    found = estimate(machines, lines, routes, between, manifest.training.staleness, delays)
    return Prediction(
        run=manifest.name,
        estimate=found,
        measured_s=_measured(signed, adverts),
        fresh_steps=manifest.training.fresh_steps,
        members=tuple(
            PredictedVolunteer(
                peer=peer,
                name=advert.name or short_id(peer),
                blocks=(advert.block_begin, advert.block_end),
                computing=found.computing[peer],
                sending=found.sending[peer],
            )
            for peer, advert in sorted(taking_part.items(), key=lambda one: (one[1].block_begin, one[0]))
        ),
    )


def _routes(manifest: Manifest, working: Mapping[str, Advert]) -> dict[int, Route]:
    """Microbatch → its way, as the coordinator gives them out."""
    roster = {peer: (advert.block_begin, advert.block_end) for peer, advert in working.items()}
    for block in range(len(manifest.blocks)):
        if not any(begin <= block < end for begin, end in roster.values()):
            raise _too_early(f"nobody holds block {block}")
    for peer, advert in working.items():
        if not (advert.forward_s and advert.backward_s):
            raise _too_early(f"{advert.name or short_id(peer)} has not computed anything yet")
    speeds = {
        peer: (advert.block_end - advert.block_begin) / (advert.forward_s + advert.backward_s)
        for peer, advert in working.items()
    }
    return assign_routes(
        range(manifest.training.microbatches),
        roster,
        len(manifest.blocks),
        speeds,
        _known_lines(working, roster, speeds, mixed=manifest.trust.spot_checks > 0),
    )


def _known_lines(
    working: Mapping[str, Advert], roster: Roster, speeds: Mapping[str, float], *, mixed: bool
) -> LinkCosts:
    """Link costs as the coordinator has them, from links in adverts. Adverts do not name clusters, so any
    other link counts as one that leads out of a cluster.
    """
    notes, fastest = _notes(working), max(speeds.values())
    seconds = {}
    for (peer, to), note in notes.items():
        if note.activation_bytes:
            back = notes.get((to, peer))
            took = note.activation_bytes / note.rate + (back.gradient_bytes / back.rate if back else 0.0)
            seconds[peer, to] = took * fastest
    clusters = {peer: number for number, peer in enumerate(working)}
    return LinkCosts(clusters, seconds, leaving(roster, speeds, mixed=mixed), mixed=mixed)


def _notes(working: Mapping[str, Advert]) -> dict[tuple[str, str], LinkNote]:
    """(from, to) → the sender's advert about that link if it was measured, within believed bounds."""
    whole = {peer[-8:]: peer for peer in working}
    return {
        (peer, whole[note.to]): note.model_copy(update={"rate": believed(note.rate)})
        for peer, advert in working.items()
        for note in advert.links
        if note.rate and note.to in whole
    }


def _lines(
    manifest: Manifest,
    routes: Mapping[int, Route],
    working: Mapping[str, Advert],
    machines: Mapping[str, VirtualVolunteer],
) -> dict[tuple[str, str], PeerLink]:
    """(from, to) → link for neighbours on a route, both ways, and for senders and reducers of gradients."""
    pairs = {(a.peer, b.peer) for route in routes.values() for a, b in pairwise(route)}
    pairs |= {(b, a) for a, b in pairs}
    uplinks = {peer: machine.uplink for peer, machine in machines.items() if math.isfinite(machine.uplink)}
    roster = {peer: (advert.block_begin, advert.block_end) for peer, advert in working.items()}
    # A reduce is divided by the advertised uplinks, not by the rates of single links.
    said = {peer: believed(advert.uplink) for peer, advert in working.items()}
    sums = reduce_bytes(manifest, routes, roster, said)
    lines, notes = {}, _notes(working)
    estimated, number = lines_of(working), {peer: n for n, peer in enumerate(working)}
    for sender, to in sorted(pairs | sums.keys()):
        note = notes.get((sender, to))
        if note is not None:
            lines[sender, to] = PeerLink(
                rate=note.rate,
                delay_s=working[sender].encode_s + note.trip_s / 2 + working[to].decode_s,
                activation_bytes=note.activation_bytes,
                gradient_bytes=note.gradient_bytes,
                sums_bytes=sums.get((sender, to), 0),
            )
        elif (sender, to) in pairs:
            names = (working[peer].name or short_id(peer) for peer in (sender, to))
            raise _too_early(f"the link from {' to '.join(names)} is not measured yet")
        elif sender in uplinks:  # an advert names the slowest links alone
            pair = number[sender], number[to]
            lines[sender, to] = PeerLink(
                rate=float(estimated.rate[pair]),
                delay_s=float(estimated.latency[pair]),
                sums_bytes=sums[sender, to],
            )
    return lines


def _measured(signed: SignedManifest, adverts: Mapping[str, Advert]) -> float | None:
    speed = max((a.tokens_per_second for p, a in adverts.items() if p in signed.reliable), default=0.0)
    manifest = signed.manifest
    tokens = manifest.training.batch_size * manifest.data.tokens_per_sample
    return tokens / speed if speed else None


def _too_early(why: str) -> LocalError:
    return LocalError(
        "HP-PLAN-001",
        "nothing can be predicted yet",
        why=why,
        fix="try again in a few steps",
        exit_code=ExitCode.TRY_LATER,
    )


def reduce_bytes(
    manifest: Manifest, routes: Mapping[int, Route], roster: Roster, uplinks: Mapping[str, float]
) -> dict[tuple[str, str], int]:
    """(from, to) → bytes that the reduce of a step sends if its microbatches take `routes`.

    The holders of a block send their slots, shard by shard, to the shard's reducer; the reducer sends the
    sum to the block's holders, and to holders of tied blocks (the observers) if the shard has a tied
    parameter. Spot checks bound the reducers' shares (`divide`). `uplinks`: peer → bytes/s, 0 if unknown.
    """
    ties, codec = Ties(manifest.ties), Codec.of(manifest.links.reduce)
    sizes = {block.index: block.vector_count for block in manifest.blocks}
    contributions = {block: _contributions(block, routes) for block in sizes}
    partners = {block: ties.partners(block) for block in sizes}
    sent: defaultdict[tuple[str, str], int] = defaultdict(int)
    guarded = manifest.trust.spot_checks > 0
    for cover in divided(contributions, roster, sizes, partners, uplinks, DisputedPairs(), guarded=guarded):
        for shard in shards_of(0, cover, sizes[cover.block]):  # as plan 0; any plan has these shards
            count = shard.end - shard.begin
            nbytes = FLOAT_BYTES * count if codec.values is None else codec.values.nbytes(count)
            tied = ties.needed(shard.block, shard.begin, shard.end)
            receivers = (*cover.receivers, *(cover.observers if tied else ()))
            for holder, _ in cover.slots:
                sent[holder, shard.reducer] += nbytes
            for receiver in receivers:
                sent[shard.reducer, receiver] += nbytes
    return {(sender, to): nbytes for (sender, to), nbytes in sent.items() if sender != to}


def _contributions(block: int, routes: Mapping[int, Route]) -> Sequence[tuple[str, tuple[int, ...]]]:
    """(peer, ids that it computes at `block`), by peer."""
    ids: defaultdict[str, list[int]] = defaultdict(list)
    for number, route in sorted(routes.items()):
        for hop in route:
            if hop.begin <= block < hop.end:
                ids[hop.peer].append(number)
    return [(peer, tuple(held)) for peer, held in sorted(ids.items())]
