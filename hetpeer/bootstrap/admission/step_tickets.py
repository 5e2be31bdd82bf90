"""Step tickets: a coordinator's signed statement that a volunteer takes part in a step.

A late joiner shows its ticket to the volunteers that got the roster before. The ticket names term, view,
cluster and step, the volunteer with its incarnation, and its blocks; it is valid for nothing else.
"""

from __future__ import annotations

from collections.abc import Collection

import msgpack

from hetpeer.averaging.member.tensor_heads import Introduction
from hetpeer.averaging.messages import TermView
from hetpeer.bootstrap.run.owner_signature import pack
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import unpack
from hetpeer.dht.identity.peer_identity import Identity, peer_id_of, verify

DOMAIN = b"hetpeer admission ticket\0"


def ticket(run: str, peer: str, head: Introduction, identity: Identity) -> bytes:
    """Ticket signed by coordinator `identity`: `peer` may introduce itself with `head` (less its ticket)."""
    signature = identity.sign(_signed(run, peer, head))
    packed: bytes = msgpack.packb([identity.public_bytes, signature])
    return packed


def check(run: str, coordinators: Collection[str], peer: str, head: Introduction) -> None:
    """Raise `ProtocolError` unless one of `coordinators` signed `head`'s ticket for `peer` and this head."""
    pair = unpack(head.ticket, "an admission ticket", peer)
    try:
        public_bytes, signature = pair
        signed = verify(public_bytes, _signed(run, peer, head), signature)
    except (ValueError, TypeError) as error:
        raise ProtocolError("an admission ticket that is none", peer=peer, why=type(error).__name__) from None
    if not signed or peer_id_of(public_bytes) not in coordinators:
        raise ProtocolError("an admission ticket that no coordinator has given", peer=peer)


def _signed(run: str, peer: str, head: Introduction) -> bytes:
    """Bytes that the coordinator signs for `peer`'s ticket."""
    line: TermView = head.line
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
            **({"cluster": line.cluster} if line.cluster else {}),
        }
    )
