"""Rates of links from present and earlier adverts: an advert names only the four slowest links in use, and a
link that is no longer used is still as slow. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetpeer.dht.discovery import Advert, LinkNote


class Remembered:
    """The last note of every line between peers that are still there."""

    def __init__(self) -> None:
        self._notes: dict[tuple[str, str], LinkNote] = {}
        """(sender, the end of the receiver's id) → what it carries."""

    def __call__(self, adverts: Mapping[str, Advert]) -> dict[str, Advert]:
        """`adverts` by peer id, each with all lines that it has named."""
        ends = {peer[-8:] for peer in adverts}
        new = {
            (peer, note.to): note for peer, advert in adverts.items() for note in advert.links if note.rate
        }
        known = {**self._notes, **new}
        self._notes = {pair: note for pair, note in known.items() if pair[0] in adverts and pair[1] in ends}
        own: dict[str, list[LinkNote]] = {peer: [] for peer in adverts}
        for (sender, _), note in self._notes.items():
            own[sender].append(note)
        return {
            peer: advert.model_copy(update={"links": tuple(own[peer])}) for peer, advert in adverts.items()
        }
