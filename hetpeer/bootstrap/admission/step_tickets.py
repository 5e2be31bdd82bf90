"""Admission tickets: a coordinator's word, which anybody can check, that a volunteer takes part in a step.

Who comes into a step while it runs shows its ticket to those who were told the roster before. It names the line of
history, the step, the volunteer with its incarnation and its blocks, and is good for nothing else.
"""

from __future__ import annotations

from collections.abc import Collection

import msgpack

from hetpeer.averaging.member.tensor_heads import Introduction
from hetpeer.averaging.messages import Line
from hetpeer.bootstrap.run.canonical_bytes import pack
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import unpack
from hetpeer.dht.identity.peer_identity import Identity, peer_id_of, verify

DOMAIN = b"hetpeer admission ticket\0"


def ticket(run: str, peer: str, head: Introduction, identity: Identity) -> bytes:
    """The word of coordinator `identity` that `peer` may introduce itself with `head` (its own ticket aside)."""
    signature = identity.sign(_signed(run, peer, head))
    packed: bytes = msgpack.packb([identity.public_bytes, signature])
    return packed


def check(run: str, coordinators: Collection[str], peer: str, head: Introduction) -> None:
    """Raises `ProtocolError` unless the ticket of `head` is a word of one of `coordinators` for `peer` and this very head."""
    pair = unpack(head.ticket, "an admission ticket", peer)
    try:
        public_bytes, signature = pair
        signed = verify(public_bytes, _signed(run, peer, head), signature)
    except (ValueError, TypeError) as error:
        raise ProtocolError("an admission ticket that is none", peer=peer, why=type(error).__name__) from None
    if not signed or peer_id_of(public_bytes) not in coordinators:
        raise ProtocolError("an admission ticket that no coordinator has given", peer=peer)


def _signed(run: str, peer: str, head: Introduction) -> bytes:
    line: Line = head.line
    return DOMAIN + pack(
        {
            "run": run,
            "peer": peer,
            "incarnation": head.incarnation,
            "term": line.term,
            "view": line.view,
            "step": head.step,
            "begin": head.begin,
            "end": head.end,
        }
    )
