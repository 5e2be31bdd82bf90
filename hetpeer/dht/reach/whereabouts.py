"""Whereabouts: peers tell and ask each other where a peer listens by now.

The protocol `hetpeer/1/whereabouts` is one question and one answer:

    asker    → answerer   {"record": {…}, "of": [peer ids]}     its own record; peers that it looks for
    answerer → asker      {"records": [{…}], "again": true}     newest records; close and dial again

A peer that says where it is over one connection has no use for its other ones: they are of its former
address, and dead. p2pd cannot close one of several, so the answerer closes all after `again`, and the asker
dials anew. A record names its signer alone (address_record.py), so it leads nobody to a third peer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.identity.address_record import MAX_ASKED, AddressBook, AddressRecord, read_record
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, P2pdError
from hetpeer.dht.streams.stream import Stream

PROTOCOL = "hetpeer/1/whereabouts"
ANSWER_S = 3.0
SETTLE_S = 0.1
"""Seconds between `again` and the end of the connections, so that the answer arrives."""
_MAX_ID = 64

_log = logging.getLogger(__name__)


class Whereabouts:
    """The answering side, which answers from `book`. `learn` is called with the records of those that ask."""

    def __init__(
        self,
        book: AddressBook,
        control: Callable[[], P2pdControl | None],
        learn: Callable[[AddressRecord], None],
    ) -> None:
        self._book = book
        self._control = control
        self._learn = learn

    async def handle(self, stream: Stream) -> None:
        """Answer one question; passed to `Node.serve`. Raises `RemoteError`."""
        header = (await stream.receive(payload_limit=0, timeout_s=ANSWER_S)).header
        wanted = header.get("of", [])
        if not isinstance(wanted, list) or len(wanted) > MAX_ASKED:
            raise ProtocolError("a question about peers that is none", peer=stream.peer_id)
        if not all(isinstance(peer, str) and len(peer) <= _MAX_ID for peer in wanted):
            raise ProtocolError("a question about peers that are none", peer=stream.peer_id)
        again = False
        if (value := header.get("record")) is not None:
            record = read_record(value)
            if record.peer_id != stream.peer_id:
                raise ProtocolError("an address record of somebody else", peer=stream.peer_id)
            wanted = [*wanted, record.peer_id]
            self._learn(record)
            again = await self._has_others(stream)
        known = [found.fields for peer in dict.fromkeys(wanted) if (found := self._book.of(peer)) is not None]
        await stream.send({"records": known, "again": again}, timeout_s=ANSWER_S)
        if again and (control := self._control()) is not None:
            await asyncio.sleep(SETTLE_S)
            _log.info("%s comes from another address: its former connections are closed", stream.peer_id)
            with suppress(P2pdError):
                await control.disconnect(stream.peer_id)

    async def _has_others(self, stream: Stream) -> bool:
        """Whether the peer has connections to us besides the one of `stream`."""
        control = self._control()
        if control is None:
            return False
        with suppress(P2pdError):
            there = {text for peer, text in await control.connections() if peer == stream.peer_id}
            return bool(there - {stream.address})
        return False


async def ask(
    control: P2pdControl, peer_id: str, own: AddressRecord | None = None, of: Iterable[str] = ()
) -> tuple[list[AddressRecord], bool]:
    """Tell `peer_id` our `own` record, and ask about peers: (records, whether to dial it again).

    Raises `PeerLostError`, `ProtocolError`.
    """
    question = {"of": list(of)[:MAX_ASKED]} | ({"record": dict(own.fields)} if own is not None else {})
    async with await control.open_stream(peer_id, PROTOCOL, ANSWER_S) as stream:
        await stream.send(question, timeout_s=ANSWER_S)
        header = (await stream.receive(payload_limit=0, timeout_s=ANSWER_S)).header
    return _records(header.get("records"), peer_id), header.get("again") is True


def _records(value: object, peer: str) -> list[AddressRecord]:
    """Raises `ProtocolError`."""
    if not isinstance(value, list) or len(value) > MAX_ASKED + 1:
        raise ProtocolError("an answer about peers that is none", peer=peer)
    return [read_record(one) for one in value]
