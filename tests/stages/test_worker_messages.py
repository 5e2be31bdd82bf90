"""Commands and results as bytes, whatever comes."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import LocalError, ProtocolError
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc import worker_messages as r
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.worker_messages import (
    MAX_FRAME_BYTES,
    PREFIX,
    FrameReader,
    decode_command,
    decode_result,
    encode_message,
)
from tests.amounts import examples
from tests.stages.compute_rig import DRAW, KEPT, UPDATE

EXAMPLES = [
    c.Forward(
        step=3,
        versions=(2,),
        task="3:1",
        begin=1,
        end=2,
        batch=2,
        draw=DRAW,
        inputs={"x": Extent(64, 128)},
        train=False,
    ),
    c.PrepareBlock(block=2, graph=b"\x00\xff", update=UPDATE, keeps=KEPT),
    v.SumVectors(parts=(Extent(0, 8), Extent(64, 8)), into=Extent(128, 8), elements=2),
    c.Shutdown(),
]


@given(sizes=st.lists(st.integers(1, 200), max_size=50))
def test_frames_survive_any_split(sizes):
    stream = b"".join(encode_message(number, command) for number, command in enumerate(EXAMPLES))
    reader, found = FrameReader(), []
    for size in [*sizes, len(stream)]:
        found += [(number, decode_command(body)) for number, body in reader.feed(stream[:size])]
        stream = stream[size:]
    assert found == list(enumerate(EXAMPLES))


def test_results_come_back_as_they_were():
    for result in (
        r.Forwarded(loss=None, seconds=0.25),
        r.Inspected(digest="ab", squared_norm=float("inf"), finite=False, seconds=0.5),
        r.CommandFailed(code="HP-X", what="so", why="thus", fix="try"),
    ):
        ((number, body),) = FrameReader().feed(encode_message(7, result))
        assert (number, decode_result(body)) == (7, result)


@examples(300)
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5) | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["kind", "block", "task", "unload"]), inner)
        ),
    ).map(msgpack.packb)
)
def test_decoders_raise_protocol_errors_only(body):
    for decode in (decode_command, decode_result):
        try:
            decode(body)
        except ProtocolError:
            continue


def test_an_oversized_frame_is_refused_by_its_length():
    with pytest.raises(ProtocolError, match="a frame of"):
        FrameReader().feed(PREFIX.pack(MAX_FRAME_BYTES + 1, 0))


@pytest.mark.parametrize("number", ["1" * 40, 1.0, True, -1, 2**63])
def test_a_place_is_whole_numbers(number):
    body = encode_message(0, c.LoadState(block=0, state=Extent(0, 64)))[PREFIX.size :]
    fields = msgpack.unpackb(body)
    fields["state"]["offset"] = number
    with pytest.raises(ProtocolError):
        decode_command(msgpack.packb(fields))


def test_a_worker_cannot_fill_the_log():
    said = {"kind": "failed", "code": "HP-NUM-001", "what": "what", "why": "why", "fix": "fix"}
    assert decode_result(msgpack.packb(said)) == r.CommandFailed(
        code="HP-NUM-001", what="what", why="why", fix="fix"
    )
    for name in ("code", "what", "why", "fix"):
        with pytest.raises(ProtocolError):
            decode_result(msgpack.packb(said | {name: "x" * 10**6}))


def test_a_long_failure_is_told_as_far_as_there_is_room():
    error = LocalError("HP-NUM-001", "x" * 5000, why="y" * 5000, fix="z")
    told = decode_result(encode_message(0, r.failed(error))[PREFIX.size :])
    assert told == r.CommandFailed(code="HP-NUM-001", what="x" * r.MAX_TEXT, why="y" * r.MAX_TEXT, fix="z")
