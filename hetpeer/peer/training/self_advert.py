"""A peer's advert of itself in the DHT, every few seconds: adverts find and inform, they never decide."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from hetpeer.averaging.member.member_life import Phase
from hetpeer.averaging.member.work_in_progress import WorkerOccupation
from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.discovery import BACKUP, LEFT, MAX_LINKS, Advert, LinkNote, Roster
from hetpeer.dht.node.node import Node
from hetpeer.dht.reach.reachability import PeerPath
from hetpeer.peer.training.volunteer import Volunteer
from hetpeer.peer.transport.link_book import LinkFigures

PUBLISH_S = 3.0
GAP_S = 0.5
"""Seconds between two adverts at least, however often something in them changes."""
LOOK_S = 0.2
"""Seconds between two looks at least whether something has changed."""
TTL_S = 30.0
LEAVE_S = 1.0
AT_WORK = frozenset({Phase.READY, Phase.TRAINING, Phase.REDUCING, Phase.APPLYING})
"""Phases of each step: that one follows the other is nothing that others wait for."""

_log = logging.getLogger(__name__)


async def _nothing() -> None:
    """Never returns: for an advert in which nothing is notable."""
    await asyncio.get_running_loop().create_future()


async def anything() -> None:
    """Returns at once: for an advert whose changes are not announced."""


async def publish_forever(
    roster: Roster,
    make: Callable[[], Advert],
    notable: Callable[[], object] = lambda: None,
    happens: Callable[[], Awaitable[object]] = _nothing,
) -> None:
    """Publish a fresh advert every PUBLISH_S, and sooner once its `notable` part has changed, after GAP_S at
    least.

    `happens` returns once something has happened that may have changed it; there is no look before that. A
    store that fails is tried again at the next turn.
    """
    while True:
        told = notable()
        try:
            if not await roster.publish(make(), ttl_s=TTL_S):
                _log.debug("advert not published: no node took it")
        except RemoteError as error:
            _log.debug("advert not published: %s", error)
        await asyncio.sleep(GAP_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PUBLISH_S - GAP_S):
                await _changed(notable, told, happens)


async def _changed(
    notable: Callable[[], object], told: object, happens: Callable[[], Awaitable[object]]
) -> None:
    """Return when `notable()` differs from `told`, what the last advert had."""
    while notable() == told:
        await happens()
        await asyncio.sleep(LOOK_S)


async def take_leave(roster: Roster, node: Node, role: str) -> None:
    """Publish that we have left, so that nobody waits for us. Takes LEAVE_S at most; never raises."""
    gone = Advert(role=role, state=LEFT, **reach_fields(node))
    with contextlib.suppress(RemoteError, TimeoutError):
        async with asyncio.timeout(LEAVE_S):
            await roster.publish(gone, ttl_s=TTL_S)


def volunteer_advert(
    volunteer: Volunteer, node: Node, device_name: str, coordinate: Sequence[int] = ()
) -> Advert:
    """Role, blocks and progress of a volunteer, which is at the network `coordinate`."""
    member = volunteer.member
    begin, end = member.place or (0, 0)
    shares = {
        what: round(share, 3) for what, share in volunteer.figures.shares.lately(time.monotonic()).items()
    }
    return Advert(
        name=volunteer.offer.name,
        addresses=tuple(node.addresses()[:8]),
        role="volunteer",
        state=BACKUP if member.life.is_spared else member.phase.value,
        block_begin=begin,
        block_end=end,
        step=member.version or 0,
        loss=member.loss,
        tokens_per_second=volunteer.tokens_per_second,
        forward_s=volunteer.links.mean("forward"),
        backward_s=volunteer.links.mean("backward"),
        varies=round(volunteer.links.varies, 3),
        encode_s=volunteer.links.mean("encode"),
        decode_s=volunteer.links.mean("decode"),
        between_s=volunteer.figures.between_s,
        update_s=(end - begin) * (volunteer.links.mean("inspect") + volunteer.links.mean("update")),
        computes=shares[WorkerOccupation.COMPUTES],
        waits_data=shares[WorkerOccupation.DATA],
        waits_room=shares[WorkerOccupation.ROOM],
        uplink=round(volunteer.links.outflow.seen or volunteer.offer.uplink),
        downlink=round(volunteer.offer.downlink),
        coordinate=tuple(coordinate),
        flops_per_second=float(round(member.life.hello.flops_per_second)),
        product_flops=float(round(volunteer.offer.flops_per_second)),
        **volunteer.offer.hello_fields(),
        gpu_bytes=volunteer.offer.gpu_bytes,
        processor=volunteer.offer.processor.mark(member.life.hello.run),
        processor_part=round(volunteer.offer.processor.part, 4),
        device=device_name[:32],
        links=tuple(link_notes(volunteer.links.links, node.path)),
        **reach_fields(node),
    )


def notable_of_volunteer(volunteer: Volunteer) -> object:
    """Phase and place: an advert is published at once when they change. All phases of a step count as one."""
    member = volunteer.member
    phase = True if member.phase in AT_WORK else member.phase
    return BACKUP if member.life.is_spared else phase, member.place


def workless_advert(node: Node, name: str, state: str) -> Advert:
    """Advert of a volunteer without a worker and blocks: it is on hold, or the worker is being started."""
    return Advert(
        name=name, addresses=tuple(node.addresses()[:8]), role="volunteer", state=state, **reach_fields(node)
    )


def reach_fields(node: Node) -> dict[str, Any]:
    """Fields of an advert that say how others reach us, and for how long already."""
    return {
        "up_s": float(round(node.up_s)),
        "reach": node.reach_estimate.reach.value,
        "reach_peers": node.reach_estimate.peers,
        "relays": tuple(relay[-8:] for relay in node.relays[:MAX_LINKS]),
    }


def link_notes(links: Mapping[str, LinkFigures], path: Callable[[str], PeerPath | None]) -> list[LinkNote]:
    """The links that bundles were sent on, as many as an advert may have: first those that take longest for
    their largest bundle.
    """
    used = [(peer, figures) for peer, figures in links.items() if figures.sent_bytes]
    used.sort(key=lambda link: -link[1].seconds)
    return [
        LinkNote(
            to=peer[-8:],
            rate=round(figures.rate),
            trip_s=round(figures.trip_s, 4),
            activation_bytes=figures.activation_bytes,
            gradient_bytes=figures.gradient_bytes,
            ratio=round(figures.ratio, 2),
            codec=figures.codec,
            aim_s=round(figures.aim_s, 4),
            saved_bytes=max(figures.raw_bytes - figures.sent_bytes, 0),
            path=str(path(peer) or ""),
        )
        for peer, figures in used[:MAX_LINKS]
    ]
