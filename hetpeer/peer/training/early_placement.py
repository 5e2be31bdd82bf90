"""Joining while no coordinator answers: choose and prepare a place by the peers' adverts in the DHT.

Adverts decide nothing. They tell which blocks have the fewest holders, and with which place a step would be
shortest, so that the files of the likely place are here when a coordinator admits us. If it gives us another
place, those files were fetched in vain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from hetpeer.averaging.member.position import choose_place
from hetpeer.averaging.messages import Place
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.state.core_config import coordinator_config
from hetpeer.bootstrap.state.membership import Membership
from hetpeer.bootstrap.state.placement_policies import ranked
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.discovery import BACKUP, Advert, Roster
from hetpeer.peer.limits.amounts import blocks_text
from hetpeer.peer.planning.advert_lines import uplink_of
from hetpeer.peer.preparation.state_fetcher import RunFiles
from hetpeer.peer.training.volunteer_figures import Offer
from hetpeer.stages.planning.network_coordinates import Coordinate

SILENCE_S = 3.0
"""Seconds of silence after which a coordinator is taken for absent."""
LOOK_AGAIN_S = 5.0
FLOAT_BYTES = 4

_log = logging.getLogger(__name__)


def places_seen(
    run: RunDirectory, adverts: Mapping[str, Advert], offer: Offer, at: Coordinate | None = None
) -> tuple[Place, ...]:
    """The places that a coordinator would offer a machine like `offer` if the adverts were all there is.

    `at`: where that machine is in the network; None: unknown.
    """
    config = coordinator_config(run)
    members = Membership(config.layouts, config.costs)
    for peer, advert in sorted(adverts.items()):
        if advert.role == "volunteer" and advert.block_begin < advert.block_end:
            members.volunteers[peer] = _holder(peer, advert)
            members.backups |= {peer} if advert.state == BACKUP else set()
            members.adopt(members.volunteers[peer], (advert.block_begin, advert.block_end))
    newcomer = VolunteerState(
        "",
        0,
        0.0,
        flops_per_second=offer.flops_per_second,
        product_flops=offer.flops_per_second,
        offered=offer.memory,
        uplink=offer.uplink,
        downlink=offer.downlink,
        coordinate=at,
    )
    return ranked(members, newcomer, config.asks)


def _holder(peer: str, advert: Advert) -> VolunteerState:
    """A volunteer by its advert, as a coordinator would know it."""
    return VolunteerState(
        peer,
        0,
        0.0,
        flops_per_second=advert.flops_per_second,
        product_flops=advert.product_flops,
        computing=advert.forward_s + advert.backward_s,
        uplink=uplink_of(advert),
        downlink=advert.downlink,
        coordinate=Coordinate.of(advert.coordinate),
    )


def state_bytes(manifest: Manifest, blocks: Iterable[int]) -> int:
    """Bytes of the states of `blocks` on the network, at most."""
    vectors = 1 + len(manifest.optimizer_state)
    return sum(manifest.blocks[block].vector_count for block in blocks) * FLOAT_BYTES * vectors


def missing_bytes(run: RunDirectory, blocks: Iterable[int]) -> int:
    """Bytes of the graphs and constants of `blocks` that are not on this disk yet, by file size."""
    entries = [run.manifest.blocks[block] for block in blocks]
    needed = [(run.path / "graph" / entry.graph.name, entry.graph.bytes) for entry in entries]
    needed += [
        (run.path / "state" / entry.buffers.name, entry.buffers.bytes) for entry in entries if entry.buffers
    ]
    return sum(nbytes for path, nbytes in needed if not path.is_file() or path.stat().st_size != nbytes)


async def prepare_ahead(
    roster: Roster,
    files: RunFiles,
    offer: Offer,
    admitted: Callable[[], bool],
    at: Callable[[], Coordinate | None] = lambda: None,
) -> Place | None:
    """Fetch the files of the place that the coordinator is likely to give us, after SILENCE_S without it.

    `at`: where we are in the network. Returns that place, or None as soon as `admitted()`. Files come from
    the peers in the roster. Raises `LocalError` HP-FIT-001 if nothing fits.
    """
    await asyncio.sleep(SILENCE_S)
    while not admitted():
        try:
            adverts = await roster.read()
            files.meet(adverts)
            place = choose_place(places_seen(files.run, adverts, offer, at()), offer.memory)
            for block in range(place.begin, place.end):
                await files.graph(block)
                await files.buffers(block)
        except RemoteError as error:
            _log.info("no coordinator answers, and not all files are to be had yet: %s", error.what)
            await asyncio.sleep(LOOK_AGAIN_S)
            continue
        _log.warning(
            "no coordinator answers yet; %s are ready, and this volunteer waits",
            blocks_text(place.begin, place.end),
        )
        return place
    return None
