"""Lines between peers by their adverts: the one source of latencies and rates for status and plans. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hetpeer.dht.discovery import Advert, LinkNote
from hetpeer.stages.planning.network_coordinates import Coordinate
from hetpeer.stages.planning.pair_lines import LineEnd, MeasuredLine, PairLines, believed, pair_lines

LONG_TRIPS = 2
"""Round trips that a bundle has to take for its line to have been full. TCP begins with 15 kB a round trip,
doubles that with each, and begins anew after a pause; shorter bundles show TCP, not the line.
"""


def lines_of(adverts: Mapping[str, Advert], wide: Collection[str] = ()) -> PairLines:
    """The lines between all peers of `adverts`, in their order. Those of the peers `wide` limit nobody."""
    numbers = {peer[-8:]: number for number, peer in enumerate(adverts)}
    measured = {
        (sender, numbers[note.to]): MeasuredLine(
            rate=note.rate, trip_s=note.trip_s, at_least=may_carry_more(note)
        )
        for sender, advert in enumerate(adverts.values())
        for note in advert.links
        if note.rate and numbers.get(note.to, sender) != sender
    }
    ends = [
        LineEnd(
            uplink=advert.uplink,
            downlink=advert.downlink,
            coordinate=Coordinate.of(advert.coordinate),
            wide=peer in wide,
        )
        for peer, advert in adverts.items()
    ]
    return pair_lines(ends, measured)


def may_carry_more(note: LinkNote) -> bool:
    """Whether the link's bundles are too short to show what its line carries."""
    bundle = max(note.activation_bytes, note.gradient_bytes)
    return 0.0 < bundle < LONG_TRIPS * note.trip_s * note.rate


def uplink_of(advert: Advert) -> float:
    """Believed bytes/s that a peer can send: no less than over its fastest link. 0: not known."""
    return believed(max(advert.uplink, *(note.rate for note in advert.links), 0.0))
