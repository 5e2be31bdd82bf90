"""Codecs keep exactly what they choose, take the bytes that were said, and believe nothing that is
damaged.
"""

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import LocalError, ProtocolError
from hetpeer.stages.links.codec import Codec, EncodedTensor, codec_names, kept_of, length, room
from hetpeer.stages.links.quantized_values import QuantizedValues
from hetpeer.stages.links.sparse_positions import PositionForm, decode_positions, encode_positions
from hetpeer.stages.links.squeezing import squeezed
from hetpeer.stages.links.tensor_codecs import decode, encode
from hetpeer.stages.links.top_k import SMALL, _largest_there, largest
from hetpeer.stages.links.value_codecs import VALUE_CODECS
from tests.amounts import examples

NAMES = codec_names()
RELATIVE = {"bf16": 2**-8, "fp16": 2**-11, "int8": 0.0, "int4": 0.0}
"""Largest rounding error of a value, relative to it, beside that of a group's steps."""
quick = examples(60, suppress_health_check=[HealthCheck.too_slow])


def there_and_back(codec, flat, kept, *, squeeze=True):
    target = memoryview(bytearray(room(codec, str(flat.dtype)[6:], len(flat), kept)))
    written, size = encode(codec, flat, kept, target, squeeze=squeeze)
    assert size == length(codec, str(flat.dtype)[6:], len(flat), written)
    assert size <= len(target)
    out = torch.full_like(flat, 7)
    decode(codec, written, target[:size], out)
    return out, written, size


def plain_topk(flat, k):
    """The k largest magnitudes; of equal ones those that come first."""
    order = torch.sort(flat.abs(), descending=True, stable=True).indices[:k]
    return order.sort().values


def _draw(seed, count, kind):
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(count, generator=generator)
    match kind:
        case (
            "channels"
        ):  # every 128th element is a thousand times larger: a sample may see none, or only these
            flat[:: 128 if seed % 2 else 65] *= 1000
        case "ties":
            flat = flat.round()
        case "zeros":
            flat[torch.rand(count, generator=generator) < 0.99] = 0
        case "tiny":
            flat *= 1e-40
        case "huge":
            flat *= 1e37
        case "one":
            flat = torch.full((count,), 0.5)
    return flat


tensors = st.builds(
    _draw,
    st.integers(0, 1 << 30),
    st.one_of(st.integers(1, 2000), st.integers(SMALL, SMALL + 9000)),
    st.sampled_from(["normal", "channels", "ties", "zeros", "tiny", "huge", "one"]),
)


@quick
@given(tensors, st.floats(0.0, 1.0))
def test_selection_is_exact(flat, share):
    """On a CPU, and as it is done on a GPU."""
    k = kept_of(len(flat), share)
    assert largest(flat, k).equal(plain_topk(flat, k))
    assert _largest_there(flat.abs(), k).equal(plain_topk(flat, k))


@quick
@given(
    tensors,
    st.sampled_from(NAMES),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.floats(0.0, 1.0),
    st.booleans(),
)
def test_decoding_gives_what_was_kept(flat, name, dtype, share, squeeze):
    codec = Codec.of(name)
    flat = flat.to(dtype)
    assume(codec.values is not VALUE_CODECS["fp16"] or flat.float().abs().max() < 65504)
    kept = kept_of(len(flat), share)
    out, written, _ = there_and_back(codec, flat, kept, squeeze=squeeze)
    if codec.values is None:
        assert out.equal(flat)
        return
    chosen = plain_topk(flat.float(), kept) if codec.sparse else torch.arange(len(flat))
    assert written.kept == len(chosen)
    left = torch.ones(len(flat), dtype=torch.bool)
    left[chosen] = False
    assert (out[left] == 0).all()
    here, there = flat.float()[chosen], out.float()[chosen]
    allowed = RELATIVE.get(codec.values.name, codec.values.tolerance) * here.abs() + (
        2**-24 if codec.values is VALUE_CODECS["fp16"] else 1e-38
    )
    if isinstance(
        codec.values, QuantizedValues
    ):  # half a step, of a scale that was rounded up by at most 1/128; then bf16's own
        group = codec.values.group
        top = torch.stack([part.abs().max() for part in here.split(group)])
        half = 0.5 / codec.values.steps
        allowed = (top * half * (1 + 2**-6) + 1e-38).repeat_interleave(group)[: len(here)]
    allowed = allowed + (here.abs() * 2**-8 if dtype == torch.bfloat16 else 0)
    assert ((here - there).abs() <= allowed).all()


@quick
@given(st.integers(1, 70_000), st.floats(0.0, 1.0), st.integers(0, 1000), st.booleans())
def test_positions_come_back_and_are_never_longer_than_a_bitmap(count, share, seed, squeeze):
    draw = np.random.default_rng(seed)
    positions = np.sort(draw.choice(count, kept_of(count, share), replace=False))
    form, data = encode_positions(positions, count, squeeze=squeeze)
    assert len(data) <= -(-count // 8)
    assert (decode_positions(form, data, len(positions), count) == positions).all()


@pytest.mark.parametrize(
    ("name", "share", "most"),
    [
        ("topk-int8", 0.1, 1.7),
        ("topk-int8", 0.01, 2.1),
        ("topk-bf16", 0.1, 2.7),
        ("topk-bf16", 0.01, 3.1),
        ("topk-int4", 0.1, 1.2),
        ("topk-int4", 0.01, 1.6),
    ],
)
def test_bytes_for_each_element_kept(name, share, most):
    flat = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    kept = kept_of(len(flat), share)
    _, _, size = there_and_back(Codec.of(name), flat, kept)
    assert size / kept <= most
    _, plain, whole = there_and_back(Codec.of(name), flat, kept, squeeze=False)
    assert not plain.value_bytes
    assert whole > size
    planned = Codec.of(name).cost(share) * len(flat)
    assert 0.8 * planned < size < 1.05 * planned, "plans count squeezed positions, and values as they are"


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("tails", [1, 2])
def test_steps_take_little_more_than_their_entropy(name, tails):
    """Normal values, and ones with longer tails (their products)."""
    codec, count = Codec.of(name), 1 << 20
    draw = torch.Generator().manual_seed(tails)
    flat = torch.stack([torch.randn(count, generator=draw) for _ in range(tails)]).prod(0)
    out, written, size = there_and_back(codec, flat, count)
    assert written == EncodedTensor(count, value_bytes=size)
    exact, _, whole = there_and_back(codec, flat, count, squeeze=False)
    assert out.equal(exact)
    bits = {"int8": 8, "int4": 4}[name]
    scales = 2 * count // codec.values.group
    assert whole == count * bits // 8 + scales
    table = flat.view(-1, codec.values.group)
    scale = table.abs().amax(1, keepdim=True) / codec.values.steps
    often = torch.unique((table / scale).round(), return_counts=True)[1] / count
    entropy = -(often * often.log2()).sum().item() * count / 8
    assert size < 1.03 * (entropy + scales)
    assert size < 0.95 * whole


def test_integers_travel_as_they_are():
    flat = torch.arange(1000)
    for name in NAMES:
        out, _, size = there_and_back(Codec.of(name), flat, 10)
        assert out.equal(flat)
        assert size == 8000


def test_what_fp16_cannot_hold_is_refused():
    with pytest.raises(LocalError, match=r"HP-NUM-002.*fp16"):
        there_and_back(Codec.of("fp16"), torch.tensor([1.0, 1e6]), 2)


@pytest.mark.parametrize(
    "name", ["", "zip", "topk", "topk-fp16", "topk-none", "int8-topk", "topk-topk-int8", "BF16"]
)
def test_unknown_codecs(name):
    with pytest.raises(ValueError):
        Codec.of(name)


def test_names_are_those_that_were_read():
    assert [str(Codec.of(name)) for name in NAMES] == NAMES


# ── damage ──────────────────────────────────────────────────────────────────────────────────────────────────


@examples(300)
@given(st.data())
def test_a_damaged_frame_is_our_error_or_a_tensor(data):
    """Never another exception, never much more memory than the tensor takes, never a value that is not
    finite.
    """
    name = data.draw(st.sampled_from(NAMES[1:]))
    codec, count = Codec.of(name), 40_000
    flat = torch.randn(count, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 5))))
    kept = kept_of(count, data.draw(st.sampled_from([0.001, 0.01, 0.1, 0.4])))
    target = bytearray(room(codec, "float32", count, kept))
    written, size = encode(codec, flat, kept, memoryview(target))
    frame = target[:size]
    for _ in range(data.draw(st.integers(1, 8))):
        frame[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    changes = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "form": st.integers(0, 4),
                "kept": st.integers(0, count + 2),
                "position_bytes": st.integers(0, size),
                "value_bytes": st.integers(0, size + 2),
            },
        )
    )
    said = EncodedTensor(
        **{field: changes.get(field, getattr(written, field)) for field in EncodedTensor.__slots__}
    )
    out = torch.empty(count)
    tracemalloc.start()
    try:
        due = length(codec, "float32", count, said)
        frame = (frame + bytes(max(0, due - size)))[:due]
        decode(codec, said, memoryview(frame), out)
    except ProtocolError:
        pass
    else:
        assert torch.isfinite(out).all()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 40 * count


def test_a_bomb_is_not_inflated():
    import zstandard

    for bomb in (
        zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28)),
        zstandard.ZstdCompressor(level=19, write_content_size=False).compress(bytes(1 << 28)),
    ):
        tracemalloc.start()
        with pytest.raises(ProtocolError):
            decode_positions(PositionForm.SQUEEZED_GAPS, bomb, 1000, 100_000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def test_a_gap_that_goes_on_is_part_of_the_next_position():
    assert decode_positions(PositionForm.GAPS, bytes([255, 255, 1]), 1, 4000).tolist() == [511]
    for kept in (2, 3):
        with pytest.raises(ProtocolError):
            decode_positions(PositionForm.GAPS, bytes([255, 255, 1]), kept, 4000)


@pytest.mark.parametrize("squeeze", [False, True])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES[1:])
def test_what_is_not_finite_is_refused_on_arrival(name, special, squeeze):
    codec, count = Codec.of(name), 1000
    flat = torch.arange(1.0, count + 1)
    target = memoryview(bytearray(room(codec, "float32", count, 100)))
    written, size = encode(codec, flat, 100, target, squeeze=False)
    dtype = torch.float16 if codec.values is VALUE_CODECS["fp16"] else torch.bfloat16
    frame = bytearray(target[:size])
    frame[:2] = torch.tensor([special], dtype=dtype).view(torch.uint8).numpy().tobytes()
    if squeeze and codec.values.squeezable:
        values = codec.values.nbytes(written.kept)
        shorter = squeezed(frame[:values])
        frame[:values] = shorter
        written = replace(written, value_bytes=len(shorter))
    with pytest.raises(ProtocolError, match="finite"):
        decode(codec, written, memoryview(frame), torch.empty(count))
