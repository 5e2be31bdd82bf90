"""Decoders of peer/: invites, what is said over the control socket, what a home remembers."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from hetpeer.bootstrap.run.vouchers import sign_voucher
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.peer.arrival.destinations import (
    Invite,
    KnownRun,
    _Book,
    _check,
    destination,
    make_invite,
    parse_invite,
)
from hetpeer.peer.control.control_messages import (
    ControlRequest,
    DaemonStatus,
    LinkStatus,
    VolunteerStatus,
    decode_answer,
)
from tests.fuzz.of_bootstrap import KEY, VOUCHERS
from tests.fuzz.target import PLACES, RUN, Target, same


def invite(data: bytes) -> Invite:
    """As it is, and with the checksum that belongs to it."""
    text = data.decode("utf-8", "replace")
    try:
        return parse_invite(text)
    except LocalError:
        return parse_invite(f"{text},{_check(text)}")


def leads_somewhere(found: Invite) -> None:
    assert parse_invite(str(found)) == found
    goal = destination([str(found)])
    assert (goal.run, goal.voucher) == (found.run, found.voucher)
    assert str(make_invite(found.name, found.run, found.addresses, found.voucher))


def invites() -> Iterable[bytes]:
    places = [parse_address(place) for place in PLACES]
    for one in (
        make_invite("tiny-llm", RUN, places),
        make_invite("x", RUN, places[:1], sign_voucher(VOUCHERS[0], KEY)),
    ):
        yield str(one).encode()
        yield str(one).rpartition(",")[0].encode()


REQUESTS = [
    ControlRequest(do="status"),
    ControlRequest(do="pause", for_s=3600.0),
    ControlRequest(do="set", key="upload", value="1 MB/s"),
]
STANDINGS = [
    DaemonStatus(state="starting", since=1.7e9),
    DaemonStatus(
        state="working",
        reason="a reason",
        why="a sentence",
        since=1.7e9,
        until=1.8e9,
        month_bytes=9,
        addresses=tuple(PLACES[:2]),
        dashboard="http://127.0.0.1:8787/#token=x",
        figures=VolunteerStatus(
            pid=1,
            run=RUN,
            unit="tok",
            steps=100,
            step=3,
            loss=2.5,
            blocks=(0, 2),
            lines=(LinkStatus(to="SupNKC", bytes_per_second=1e6),),
        ),
    ),
]
BOOK = _Book(
    runs=(KnownRun(run=RUN, named=(PLACES[0],), seen=tuple(PLACES[1:3])), KnownRun(run="a0" * 16, named=()))
)


def book(data: bytes) -> _Book:
    return _Book.model_validate_json(data)


def leads_back(found: _Book) -> None:
    assert book(found.model_dump_json().encode()) == found
    for known in found.runs:
        assert known.destination.run == known.run


TARGETS = {
    "invite": Target(
        decode=invite, refuses=(LocalError,), seeds=invites, holds=leads_somewhere, max_len=2100
    ),
    "control-request": Target(
        decode=ControlRequest.decode,
        refuses=(LocalError,),
        seeds=lambda: (one.encode() for one in REQUESTS),
        holds=same(ControlRequest.encode, ControlRequest.decode),
    ),
    "control-answer": Target(
        decode=decode_answer,
        refuses=(LocalError,),
        seeds=lambda: (one.encode() for one in STANDINGS),
        holds=same(DaemonStatus.encode, decode_answer),
    ),
    "known-runs": Target(
        decode=book,
        refuses=(ValidationError,),
        seeds=lambda: [BOOK.model_dump_json().encode()],
        holds=leads_back,
    ),
}
