"""Decoders of bootstrap/: what owners sign, what reliable peers say to each other and serve, logs of
volunteers and of a run.

What is signed is tried twice: as it is, and with the signature that belongs to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from hetpeer.averaging import messages as m
from hetpeer.averaging.member.tensor_heads import Introduction
from hetpeer.bootstrap.admission import step_tickets
from hetpeer.bootstrap.admission.admission import Admission, Admitted
from hetpeer.bootstrap.consensus import raft_messages as raft
from hetpeer.bootstrap.log import credit_ranking, loss_curves
from hetpeer.bootstrap.log.evidence import AppliedEvent, Event, read_record
from hetpeer.bootstrap.log.record_log import _frame, read_log
from hetpeer.bootstrap.log.volunteer_log import Record, read_event, sign_event
from hetpeer.bootstrap.run import owner_signature
from hetpeer.bootstrap.run.amendment import Amendment, SignedAmendment, read_amendment, sign_amendment
from hetpeer.bootstrap.run.manifest import Manifest, SignedManifest, public_bytes, read, sign, validated
from hetpeer.bootstrap.run.owner_signature import AMENDMENT, MANIFEST, SignedKind
from hetpeer.bootstrap.run.settings import AdmissionSettings
from hetpeer.bootstrap.run.vouchers import (
    VOUCHER,
    Voucher,
    as_text,
    of_text,
    read_voucher,
    sign_voucher,
)
from hetpeer.bootstrap.storage.replication import _Keep
from hetpeer.dht.base.errors import LocalError, ProtocolError
from hetpeer.dht.streams.frame import decode_header
from tests.fuzz.target import RUN, A, B, Target, known, same

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OWNER = public_bytes(KEY)


def sealed(kind: SignedKind, body: bytes) -> bytes:
    """A file whose owner has signed whatever `body` is."""
    signature = KEY.sign(f"hetpeer {kind.name}\0".encode() + body)
    return owner_signature.pack({kind.name: body, "signature": signature})


def body_of(kind: SignedKind, data: bytes) -> bytes:
    body: bytes = owner_signature.unpack(data)[kind.name]
    return body


def both(
    kind: SignedKind, read_one: Callable[[bytes], Any], refuses: type[Exception]
) -> Callable[[bytes], Any]:
    """Of a file that the owner signed, and of a body that is signed now."""

    def decode(data: bytes) -> Any:
        try:
            return read_one(data)
        except refuses:
            return read_one(sealed(kind, data))

    return decode


# ── what the owner signs ────────────────────────────────────────────────────────────────────────────────────


def manifests() -> Iterable[bytes]:
    file = {"name": "block-000.graph", "blake3": "ab" * 32, "bytes": 10}
    costs = (
        "parameter_count",
        "vector_count",
        "parameter_bytes",
        "flops_forward",
        "activation_bytes",
        "output_bytes",
    )
    block = {"graph": file, "state": file, "state_digest": "cd" * 32} | dict.fromkeys(costs, 4)
    shard = {"name": "a.safetensors", "blake3": "ef" * 32, "bytes": 1000, "samples": 20}
    fields = {
        "name": "tiny",
        "seed": 7,
        "owner": OWNER,
        "coordinators": [A],
        "blocks": [{"index": index, **block} for index in range(3)],
        "data": {
            "kind": "arrays",
            "sample": {"x": {"dtype": "float32", "shape": [2, 3]}},
            "train": [shard],
            "heldout": [shard],
        },
        "training": {},
        "layouts": [[[0, 1], [1, 3]], [[0, 3]]],
    }
    text = {"dtype": "int64", "shape": [4]}
    more = {
        "data": {
            "kind": "text",
            "sample": {"tokens": text, "targets": text},
            "train": [shard],
            "heldout": [shard],
        },
        "training": {"optimizer": {"name": "SGD"}, "groups": [{"pattern": "*.bias", "weight_decay": 0.0}]},
        "links": {"codec": "topk-int8", "reduce": "int8", "feedback": True},
        "admission": {"policy": "invited", "work_bits": 8},
        "averaging": {"outer": {}, "window_s": 0.5},
        "ties": [{"uses": [[0, 0, 2], [2, 0, 2]]}],
        "counters": {"n": 3},
        "state_dict": {"a": "b"},
        "rest": file,
    }
    for one in (fields, fields | more):
        data = sign(validated(Manifest, one), KEY)
        yield data
        yield body_of(MANIFEST, data)


def is_manifest(found: SignedManifest) -> None:
    manifest = found.manifest
    assert manifest.layout(7)
    assert manifest.upkeep.kept >= len(manifest.optimizer_state)
    assert manifest.data_plan.microbatches == manifest.training.microbatches
    assert found.reliable == manifest.coordinators
    if manifest.owner == OWNER:
        assert read(sign(manifest, KEY)).manifest == manifest


AMENDMENTS = [
    Amendment(run_id=RUN, sequence=1, coordinators=(A,)),
    Amendment(run_id=RUN, sequence=9, coordinators=(A,), banned=(B,), listed=(A,), revoked=("ab" * 8,)),
    Amendment(run_id=RUN, sequence=9, coordinators=(A,), pardoned={B: 4}),
]


def amendment(data: bytes) -> SignedAmendment:
    return read_amendment(data, OWNER, RUN)


def is_amendment(found: SignedAmendment) -> None:
    assert amendment(sign_amendment(found.amendment, KEY)).amendment == found.amendment


def voucher(data: bytes) -> Voucher:
    """As bytes, and as the text in an invite."""
    assert of_text(as_text(data[:512])) == data[:512]
    return read_voucher(data, OWNER, RUN)


def is_voucher(found: Voucher) -> None:
    assert voucher(sign_voucher(found, KEY)) == found


VOUCHERS = [
    Voucher(run_id=RUN, serial="ab" * 8, expires=1_800_000_000, uses=20),
    Voucher(run_id=RUN, serial="00" * 8, expires=0, uses=1),
]


def signed(kind: SignedKind, files: Iterable[bytes]) -> Iterable[bytes]:
    for data in files:
        yield data
        yield body_of(kind, data)


# ── who comes in ────────────────────────────────────────────────────────────────────────────────────────────


def door(data: bytes) -> Any:
    """What a coordinator decides about whoever says such a hello."""
    hello = m.decode(data)
    if not isinstance(hello, m.Hello):
        raise ProtocolError("no hello")
    decided = Admission(RUN, OWNER, AdmissionSettings(policy="invited")).judge(A, hello, 0.0, "", ())
    work = Admission(RUN, OWNER, AdmissionSettings(work_bits=3)).judge(A, hello, 0.0, "", ())
    return decided, work


def is_decided(found: Any) -> None:
    for one in found:
        if isinstance(one, m.Rejected):
            assert m.decode(m.encode(one)) == one
        else:
            assert isinstance(one, Admitted)
            owner_signature.pack(one.record)


def hellos() -> Iterable[bytes]:
    for one in VOUCHERS:
        yield m.encode(m.Hello(run=RUN, incarnation=1, voucher=sign_voucher(one, KEY), work=bytes(8)))


def ticket(data: bytes) -> bytes:
    step_tickets.check(RUN, (known().peer_id,), B, introduction(data))
    return data


def introduction(data: bytes) -> Introduction:
    return Introduction.model_construct(
        line=m.TermView(term=1, view=2),
        step=3,
        incarnation=4,
        kind="introduction",
        begin=0,
        end=2,
        ticket=data,
    )


# ── among reliable peers ────────────────────────────────────────────────────────────────────────────────────

RAFT = [
    raft.RequestVote(term=3, length=9, last_term=2, pre=True),
    raft.VoteReply(term=3, granted=True),
    raft.Append(
        term=3,
        begin=9,
        last_term=2,
        committed=9,
        entries=(
            raft.LogEntry(term=3, record=None),
            raft.LogEntry(
                term=3, record={"kind": "commit", "step": 1, "losses": {1: 2.5}, "cover": [["Qm", [1, 2]]]}
            ),
        ),
    ),
    raft.Appended(term=3, fits=False, length=4),
    raft.TakeOver(term=3),
]


def keeps(found: raft.Message) -> None:
    """It is answered, and its entries are written down."""
    same(raft.encode, raft.decode)(found)
    if isinstance(found, raft.Append):
        for place, entry in enumerate(found.entries, found.begin):
            _frame({"kind": "entry", "place": place, "term": entry.term, "record": entry.record})


def keep(data: bytes) -> _Keep:
    """What a reliable peer is asked to copy."""
    try:
        return _Keep.model_validate(decode_header(data))
    except ValidationError as error:
        raise ProtocolError("not a request to keep a checkpoint") from error


def keep_bytes(found: _Keep) -> bytes:
    data: bytes = msgpack.packb(found.model_dump(mode="json"))
    return data


def value(data: bytes) -> Any:
    return owner_signature.unpack(data)


def ranks(data: bytes) -> credit_ranking.Ranking:
    return credit_ranking.decode(data, A)


def curve(data: bytes) -> loss_curves.Curves:
    return loss_curves.Curves.decode(data, A)


def rankings() -> Iterable[bytes]:
    yield credit_ranking.encode(credit_ranking.ranking({A: 100, B: 7}, A))
    yield credit_ranking.encode(credit_ranking.ranking({}))


# ── logs ────────────────────────────────────────────────────────────────────────────────────────────────────

APPLIED = {
    "kind": "applied",
    "run": RUN,
    "peer": known().peer_id,
    "incarnation": 1,
    "term": 1,
    "view": 0,
    "step": 3,
    "block": 1,
    "plan": 0,
    "cover": [[A, [1, 2]], [B, [3]]],
    "gradient": "ab" * 32,
    "state": "cd" * 32,
}
LEFTOVER = {
    "kind": "leftover",
    "run": RUN,
    "peer": known().peer_id,
    "view": 0,
    "step": 3,
    "border": 2,
    "sender": B,
    "ids": [4, 5],
}


def event(data: bytes) -> tuple[str, Record]:
    return read_event(data.decode("utf-8", "replace"))


def is_event(found: tuple[str, Record]) -> None:
    assert found[0] == known().peer_id
    owner_signature.pack(found[1])


def testimony(data: bytes) -> Event | None:
    """What is behind the signature of a volunteer's line."""
    try:
        record = json.loads(data)
        owner_signature.pack(record)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError("it cannot be signed") from error
    if not isinstance(record, dict):
        raise ProtocolError("no record")
    return read_record(known().peer_id, record, known().peer_id, RUN)


def is_evidence(found: Event | None) -> None:
    if isinstance(found, AppliedEvent):
        assert hash(found.key) is not None
        found.tally()


_FILE = os.memfd_create("log")


def log(data: bytes) -> list[Any]:
    """A file whose bytes have changed since they were written."""
    os.ftruncate(_FILE, 0)
    os.pwrite(_FILE, data, 0)
    return list(read_log(Path(f"/proc/self/fd/{_FILE}")))


def logs() -> Iterable[bytes]:
    frames = [_frame({"kind": "commit", "step": step, "losses": {1: 2.5}}) for step in range(3)]
    yield b"".join(frames)
    yield frames[0] + frames[1][:9]
    yield frames[0] + bytes(40)


TARGETS = {
    "manifest": Target(
        decode=both(MANIFEST, read, LocalError),
        refuses=(LocalError,),
        seeds=manifests,
        holds=is_manifest,
        max_len=8192,
    ),
    "amendment": Target(
        decode=both(AMENDMENT, amendment, LocalError),
        refuses=(LocalError,),
        seeds=lambda: signed(AMENDMENT, (sign_amendment(one, KEY) for one in AMENDMENTS)),
        holds=is_amendment,
    ),
    "voucher": Target(
        decode=both(VOUCHER, voucher, ValueError),
        refuses=(ValueError,),
        seeds=lambda: signed(VOUCHER, (sign_voucher(one, KEY) for one in VOUCHERS)),
        holds=is_voucher,
        max_len=600,
    ),
    "door": Target(decode=door, refuses=(ProtocolError,), seeds=hellos, holds=is_decided, max_len=2048),
    "ticket": Target(
        decode=ticket,
        refuses=(ProtocolError,),
        seeds=lambda: [step_tickets.ticket(RUN, B, introduction(b""), known())],
        max_len=2048,
    ),
    "raft-message": Target(
        decode=raft.decode, refuses=(ProtocolError,), seeds=lambda: map(raft.encode, RAFT), holds=keeps
    ),
    "keep-request": Target(
        decode=keep,
        refuses=(ProtocolError,),
        seeds=lambda: [keep_bytes(_Keep(version=8, blocks=("ab" * 32, "cd" * 32)))],
        holds=same(keep_bytes, keep),
    ),
    "canonical": Target(
        decode=value,
        refuses=(ValueError,),
        seeds=lambda: [owner_signature.pack(APPLIED), owner_signature.pack({"a": [1, {"b": b"x"}]})],
    ),
    "ranking": Target(
        decode=ranks, refuses=(ProtocolError,), seeds=rankings, holds=same(credit_ranking.encode, ranks)
    ),
    "curves": Target(
        decode=curve,
        refuses=(ProtocolError,),
        seeds=lambda: [
            loss_curves.Curves(training=((1.0, 2.5), (2.0, 2.25)), evaluation=((2.0, 2.5),)).encode()
        ],
        holds=same(loss_curves.Curves.encode, curve),
    ),
    "event": Target(
        decode=event,
        refuses=(ProtocolError,),
        seeds=lambda: [sign_event(one, known()).encode() for one in (APPLIED, LEFTOVER)],
        holds=is_event,
    ),
    "testimony": Target(
        decode=testimony,
        refuses=(ProtocolError, ValidationError),
        seeds=lambda: [json.dumps(one).encode() for one in (APPLIED, LEFTOVER)],
        holds=is_evidence,
    ),
    "log-file": Target(decode=log, refuses=(LocalError,), seeds=logs),
}
