"""Decoders of averaging/: messages between volunteers and coordinator, heads of tensors between
volunteers.
"""

from __future__ import annotations

from typing import Any

import msgpack

from hetpeer.averaging import messages as m
from hetpeer.averaging.member.tensor_heads import (
    ActivationHead,
    Coded,
    GradientHead,
    Head,
    Introduction,
    ShardHead,
    decode_head,
)
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.streams.frame import decode_header
from hetpeer.stages.graph.block_spec import TensorSpec
from hetpeer.stages.ipc.arena import BundleLayout
from hetpeer.stages.links.codec import Codec, EncodedTensor
from hetpeer.stages.pipeline.routes import Hop
from tests.fuzz.target import RUN, A, B, Target, same

LINE = m.TermView(term=3, view=1)
HELD = (m.Held(block=0, version=7, digest="ab" * 32),)
TASK = m.Task(id=5, route=(Hop(A, 0, 2), Hop(B, 2, 4)))
PLACE = m.Place(cluster=0, begin=0, end=2, memory_bytes=1 << 30, flops=1e9, holders=1, open=True)
AT: dict[str, Any] = {"line": LINE, "step": 7}
PLAN: dict[str, Any] = {**AT, "plan": 2}
COVER = m.Cover(block=1, slots=((A, (1, 2)), (B, (3,))), reducers=((A, 2), (B, 1)), receivers=(A, B))
VOTE = m.BlockVote(block=0, digest="ab" * 32, squared_norm=1.5, finite=True, group_squares=(0.5, 1.0))
LENGTH = m.Length(block=0, peer=A, squared=2.5)
RECEIVED = m.Received(block=0, of=3, reducer=B, digest="ef" * 16, finite=False)
COMMIT = m.Commit(**PLAN, coefficient=0.5, loss=2.25, digests={0: "cd" * 32})
MARK = m.Mark(block=1, begin=0, end=9, key=bytes(16))
SEEN = MARK.model_copy(update={"values": bytes(64)})
GIVEN = m.Given(id=3, begin=2, back=False, peer=A, digest=bytes(16))

MESSAGES = [
    m.Hello(run=RUN, incarnation=2, name="ada", memory_bytes=1 << 33, place=(0, 2), held=HELD, work=b"\1"),
    m.Claim(cluster=0, begin=0, end=2),
    m.Prepared(flops_per_second=1e9),
    m.Ready(line=LINE, version=7, held=HELD),
    m.Sealed(**AT, slot=1, contents=(m.Contents(begin=0, end=2, ids=(1, 2)),), losses={1: 2.5}),
    m.Evaluated(**AT, losses={70: 2.5}),
    m.Evaluated(**AT, losses={70: 2.5}, hits={70: (3, 16)}),
    m.Failed(**AT, id=3, why="no shard"),
    m.Reducing(**PLAN),
    m.Objection(**PLAN, block=1, peer=B, why="not finite"),
    m.Missed(**PLAN, sums=(A,), parts=(A, B)),
    m.Vote(**PLAN, blocks=(VOTE,)),
    m.Vote(**PLAN, blocks=(VOTE,), received=(RECEIVED,), lengths=(LENGTH,)),
    m.Proved(**PLAN, parts=(SEEN,), sums=(SEEN, SEEN), key=bytes(16)),
    m.Testimony(**PLAN, received=(m.Receipt(peer=A, mark=SEEN),)),
    m.Checked(**AT, check=1, id=3, begin=2),
    m.Compared(**AT, check=1, id=3, border=2, back=True, peer=B, alike=(A,), differ=(B,)),
    m.Shown(**PLAN, check=1, marks=(SEEN,), given=(GIVEN,)),
    m.Check(**AT, check=1, tasks=(TASK,)),
    m.Show(**PLAN, check=1, peer=B),
    m.Show(**PLAN, check=1, marks=(MARK,)),
    m.Applied(**AT, held=HELD),
    m.Paced(computing=0.1, links={B: 0.5}, uplink=1e6),
    m.Shuns(peers=(B,)),
    m.Farewell(),
    m.Farewell(within_s=6.0),
    m.Heartbeat(),
    m.EventLine(line='{"record":{}}'),
    m.Kept(last=""),
    m.Amended(amendment=b"\x82"),
    m.Welcome(line=LINE, version=7, member=True, places=(PLACE,), commit=COMMIT),
    m.Granted(line=LINE, begin=0, end=2),
    m.Refused(why="taken", places=(PLACE,)),
    m.Fetch(line=LINE, version=7, sources={0: (A,)}, digests={0: "ab" * 32}),
    m.Begin(
        **AT, batch=7, microbatches=8, roster={A: (0, 2)}, incarnations={A: 1}, tasks=(TASK,), ticket=b"t"
    ),
    m.Joined(**AT, entrants=(m.Entrant(peer=B, incarnation=1, begin=2, end=4),)),
    m.Reroute(**AT, tasks=(TASK,)),
    m.Gone(line=LINE, peers=(B,)),
    m.Settled(**AT, slot=1, refused=(1,)),
    m.Evict(**AT, blocks=(1,)),
    m.Plan(**PLAN, covers=(COVER,), closely=(1,), marks=(MARK,)),
    m.Prove(**PLAN, marks=(MARK, MARK)),
    m.Testify(**PLAN, marks=(MARK,)),
    COMMIT,
    m.RolledBack(line=LINE, version=4, why="a block is gone"),
    m.Save(line=LINE, version=8, blocks=(0, 1)),
    m.Fenced(why="silent"),
    m.Released(safe=True),
    m.Finished(why="done", completed=True),
    m.Rejected(reason="banned", why="by the author"),
]

ROUTE = (Hop(A, 1, 2), Hop(B, 2, 4))
CODED = Coded(codec="topk-int8", written=(EncodedTensor(10, 1, 8), EncodedTensor(64)))
IN_STEP: dict[str, Any] = {**AT, "incarnation": 1}
HEADS = [
    ActivationHead(**IN_STEP, id=5, batch=7, route=ROUTE, attempt=0),
    ActivationHead(**IN_STEP, id=5, batch=7, route=ROUTE, attempt=1, coded=CODED, nudge=True),
    ActivationHead(**IN_STEP, id=5, batch=7, route=ROUTE, attempt=0, check=3, asks=True),
    GradientHead(**IN_STEP, id=5, border=1, coded=CODED),
    GradientHead(**IN_STEP, id=5, border=1, check=3),
    ShardHead(**IN_STEP, kind="part", plan=2, block=1, index=0, begin=0, end=500),
    ShardHead(
        **IN_STEP,
        kind="result",
        plan=2,
        block=1,
        index=1,
        begin=0,
        end=9,
        coded=Coded(codec="int8", written=(EncodedTensor(9),)),
    ),
    Introduction(**IN_STEP, begin=2, end=4, ticket=b"ticket"),
]
BUNDLE = BundleLayout.of(
    {
        "h": TensorSpec(shape=(4, 16), dtype="float32", grad=True),
        "mask": TensorSpec(shape=(64,), dtype="int64"),
    }
)


def piece(elements: int) -> BundleLayout:
    """Of a block's vector."""
    return BundleLayout({"shard": (0, 4 * elements)}, 4 * elements, {"shard": "float32"})


def head(data: bytes) -> Head | Introduction:
    """With the length of its payload, which is worked out before a byte of it is taken."""
    found = decode_head(decode_header(data), B)
    if not isinstance(found, Introduction) and found.coded is not None:
        try:
            codec = Codec.of(found.coded.codec)
        except ValueError as error:
            raise ProtocolError("an unknown codec") from error
        layout = piece(found.end - found.begin) if isinstance(found, ShardHead) else BUNDLE
        length = layout.written(codec, found.coded.written)
        assert 0 <= length <= 2 * layout.nbytes + 64
    return found


def head_bytes(found: Head | Introduction) -> bytes:
    data: bytes = msgpack.packb(found.model_dump())
    return data


BOUNDS = m.MessageBounds(blocks=8, microbatches=16, slot=4, checked=True)


def said(data: bytes) -> m.Message:
    """What a volunteer of a small run has sent."""
    return m.decode_from_volunteer(data, BOUNDS, 8)


TARGETS = {
    "message": Target(
        decode=m.decode,
        refuses=(ProtocolError,),
        seeds=lambda: map(m.encode, MESSAGES),
        holds=same(m.encode, m.decode),
    ),
    "volunteer-message": Target(
        decode=said,
        refuses=(ProtocolError,),
        seeds=lambda: (m.encode(one) for one in MESSAGES if isinstance(one, m.FromVolunteer)),
        holds=same(m.encode, m.decode),
    ),
    "tensor-head": Target(
        decode=head,
        refuses=(ProtocolError,),
        seeds=lambda: map(head_bytes, HEADS),
        holds=same(head_bytes, head),
    ),
}
