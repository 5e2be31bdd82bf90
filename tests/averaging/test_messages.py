"""Messages are what they were after a round trip; anything else is a ProtocolError that names the field."""

import builtins
import resource
import typing

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hetpeer.averaging import messages
from hetpeer.averaging.member import tensor_heads
from hetpeer.averaging.messages import (
    BlockVote,
    FromCoordinator,
    FromVolunteer,
    Hello,
    Sealed,
    TermView,
    Vote,
    decode,
    encode,
)
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.pipeline.routes import Hop
from tests.amounts import examples


def values(annotation, metadata=()):
    """A strategy for what a field of a message may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = {n: values(f.annotation, f.metadata) for n, f in annotation.model_fields.items()}
        return st.builds(annotation, **fields)
    if annotation is Hop:
        return st.tuples(values(messages.Peer), values(messages.Block), values(messages.Block))
    inner = typing.get_args(annotation)
    limits = {type(x).__name__: x for x in metadata}
    for info in [x for x in metadata if isinstance(x, FieldInfo)]:
        limits |= {type(x).__name__: x for x in info.metadata}
    match typing.get_origin(annotation) or annotation:
        case typing.Annotated:
            return values(inner[0], inner[1:])
        case typing.Literal:
            return st.sampled_from(inner)
        case builtins.tuple if Ellipsis in inner:
            least = limits["MinLen"].min_length if "MinLen" in limits else 0
            return st.lists(values(inner[0]), min_size=least, max_size=3).map(tuple)
        case builtins.tuple:
            return st.tuples(*(values(x) for x in inner))
        case builtins.dict:
            return st.dictionaries(values(inner[0]), values(inner[1]), max_size=3)
        case builtins.int:
            return st.integers(limits["Ge"].ge, limits["Lt"].lt - 1)
        case builtins.bytes:
            return st.binary(max_size=min(10, limits["MaxLen"].max_length))
        case builtins.str:
            one_line = any(getattr(limit, "pattern", None) for limit in limits.values())
            signs = st.characters(exclude_categories=("Cs",), exclude_characters="\n" if one_line else "")
            return st.text(signs, min_size="MinLen" in limits, max_size=10)
        case builtins.float:
            finite = any(getattr(limit, "allow_inf_nan", None) is False for limit in limits.values())
            least = limits["Ge"].ge if "Ge" in limits else None
            most = limits["Le"].le if "Le" in limits else None
            return st.floats(least, most, allow_nan=False, allow_infinity=False if finite else None)
        case builtins.bool:
            return st.booleans()
        case _:
            return st.one_of(*(st.none() if x is type(None) else values(x) for x in inner))


ALL = [*typing.get_args(FromVolunteer), *typing.get_args(FromCoordinator)]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@examples(15)
@given(data=st.data())
def test_round_trip_through_the_wire(kind, data):
    message = data.draw(values(kind))
    again = decode(encode(message))
    assert again == message


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)
KINDS = [kind.model_fields["kind"].default for kind in ALL]


def attempt(decoder, data):
    try:
        decoder(data)
    except ProtocolError as error:
        assert error.why


@examples(300)
@given(JSON)
def test_nonsense_is_a_protocol_error(data):
    attempt(decode, msgpack.packb(data))
    attempt(lambda found: tensor_heads.decode_head(found, "peer"), data)


@examples(300)
@given(st.sampled_from(KINDS), st.data())
def test_a_message_with_wrong_fields_is_a_protocol_error(kind, data):
    model = next(k for k in ALL if k.model_fields["kind"].default == kind)
    fields = data.draw(
        st.fixed_dictionaries({}, optional={name: JSON for name in model.model_fields if name != "kind"})
    )
    attempt(decode, msgpack.packb({"kind": kind, **fields}))


@examples(300)
@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 255))
def test_damaged_bytes_are_a_protocol_error(noise, place, value):
    attempt(decode, noise)
    whole = bytearray(encode(Hello(run="r", incarnation=1)))
    whole[place % len(whole)] = value
    attempt(decode, whole)
    attempt(decode, whole[: place % len(whole)])


def test_nesting_without_end_is_a_protocol_error():
    attempt(decode, b"\x91" * 100_000)


@examples(100)
@given(
    st.sampled_from(["activation", "gradient", "part", "result"]), st.dictionaries(st.text(max_size=8), JSON)
)
def test_a_wrong_head_is_a_protocol_error(kind, fields):
    attempt(lambda found: tensor_heads.decode_head(found, "peer"), {"kind": kind, **fields})


@pytest.mark.parametrize(
    "wrong",
    [
        {"incarnation": -1},
        {"incarnation": 2**48},
        {"run": "x" * 501},
        {"place": (0,)},
        {"place": (0, 1, 2)},
        {"memory_bytes": 1.5},
        {"held": [{"block": 70_000, "version": 0, "digest": ""}]},
    ],
)
def test_numbers_and_lengths_are_bounded(wrong):
    field = next(iter(wrong))
    with pytest.raises(ProtocolError) as caught:
        decode(msgpack.packb({"kind": "hello", "run": "r", "incarnation": 1, **wrong}))
    assert field in caught.value.why


@pytest.mark.parametrize("line", ["a\nb", "a\n", "\n"])
def test_an_event_is_one_line(line):
    """Others' lines stand after it: several of them would be taken for more than one event."""
    for wrong in ({"kind": "event", "line": line}, {"kind": "kept", "last": line}):
        with pytest.raises(ProtocolError):
            decode(msgpack.packb(wrong))


def test_fields_of_later_versions_are_ignored():
    later = {"kind": "hello", "run": "r", "incarnation": 1, "colour": "red"}
    assert decode(msgpack.packb(later)) == Hello(run="r", incarnation=1)


def test_ids_are_keys_on_the_wire_and_come_back_as_numbers():
    sealed = Sealed(line=TermView(term=1, view=0), step=2, slot=0, contents=(), losses={7: 0.5})
    assert decode(encode(sealed)).losses == {7: 0.5}


@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
def test_what_is_no_norm_is_refused(wrong):
    plain = {"kind": "vote", "line": {"term": 1, "view": 0}, "step": 0, "plan": 1}
    block = {"block": 0, "digest": "", "squared_norm": wrong, "finite": True}
    with pytest.raises(ProtocolError, match="squared_norm"):
        decode(msgpack.packb(plain | {"blocks": [block]}))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1e300])
def test_what_is_no_loss_is_refused(wrong):
    plain = {"kind": "evaluated", "line": {"term": 1, "view": 0}, "step": 0, "losses": {7: wrong}}
    with pytest.raises(ProtocolError, match="losses"):
        decode(msgpack.packb(plain))


@pytest.mark.parametrize("wrong", [(-1, 2), (1,), (0.5, 1)])
def test_what_are_no_hits_is_refused(wrong):
    plain = {"kind": "evaluated", "line": {"term": 1, "view": 0}, "step": 0, "losses": {7: 1.0}}
    assert decode(msgpack.packb(plain | {"hits": {7: (2, 3)}})).hits == {7: (2, 3)}
    assert decode(msgpack.packb(plain)).hits == {}, "as earlier versions send it"
    with pytest.raises(ProtocolError, match="hits"):
        decode(msgpack.packb(plain | {"hits": {7: wrong}}))


def test_a_squared_norm_that_is_not_finite_can_be_told():
    block = BlockVote(block=0, digest="", squared_norm=float("inf"), finite=False)
    vote = Vote(line=TermView(term=1, view=0), step=0, plan=1, blocks=(block,))
    assert decode(encode(vote)) == vote


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "x" * 10**6},
        {"kind": "paced", "computing": 0.1, "links": {"x" * 10**6: "fast"}},
        {"kind": "hello", "run": "x" * 10**6, "incarnation": 1},
    ],
)
def test_a_megabyte_that_is_wrong_is_not_repeated(fields):
    with pytest.raises(ProtocolError) as caught:
        decode(msgpack.packb(fields))
    assert len(caught.value.line()) < 1300
    assert len(caught.value.detail) < 1300


@pytest.mark.parametrize(
    ("claim", "believed"),
    [(5e-324, 0.0), (1e-12, 0.0), (0.0, 0.0), (1e9, 1e9), (1.7e308, 1e18)],
)
def test_nobodys_claim_is_the_end_of_the_arithmetic(claim, believed):
    hello = decode(msgpack.packb({**PLAIN_HELLO, "uplink": claim}))
    assert hello.uplink == believed
    paced = decode(msgpack.packb({"kind": "paced", "computing": claim, "links": {"a": claim}}))
    assert (paced.computing, paced.links) == (believed, {"a": believed})


PLAIN_HELLO = {"kind": "hello", "run": "run", "incarnation": 1}
MILLION = [None] * 1_000_000


@pytest.mark.parametrize(
    "plain",
    [
        {**PLAIN_HELLO, "held": MILLION},
        {"kind": "applied", "line": {"term": 1, "view": 0}, "step": 0, "held": MILLION},
        {
            "kind": "sealed",
            "line": {"term": 1, "view": 0},
            "step": 0,
            "slot": 0,
            "contents": [{"begin": 0, "end": 1, "ids": [None] * 50_000}] * 20,
        },
        {"kind": "paced", "computing": 1.0, "links": dict.fromkeys(range(100_000))},
        {"kind": "commit", "digests": dict.fromkeys(range(100_000))},
    ],
    ids=lambda plain: plain["kind"],
)
def test_a_message_of_nonsense_is_refused_for_little(plain):
    """Not with an error object for each of a million entries: that would be a gigabyte of them, for a
    stranger's megabyte.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(plain))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
