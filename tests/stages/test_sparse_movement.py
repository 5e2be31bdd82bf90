"""The codec of movements keeps the largest elements of each window, always in the same bytes."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.averaging.reduce.tied_parameters import Tie, Ties
from hetpeer.bootstrap.run.settings import LinkSettings
from hetpeer.dht.base.errors import LocalError, ProtocolError
from hetpeer.stages.links.sparse_movement import KEPT, WINDOW, TopK2
from hetpeer.stages.links.sparse_windows import AT_ONCE, LOWER, RECORD, UPPER
from hetpeer.stages.worker.holding.movement import Movement
from hetpeer.stages.worker.tensor_staging import CommandError
from tests.amounts import examples

CODEC = TopK2()
quick = examples(30)


def there_and_back(flat):
    data = memoryview(bytearray(CODEC.nbytes(len(flat))))
    CODEC.encode(flat, data)
    return CODEC.decode(data, len(flat)), data


def plain(flat):
    """The same, window by window and element by element."""
    out = np.zeros(len(flat), np.float32)
    for begin in range(0, len(flat), WINDOW):
        window = flat[begin : begin + WINDOW].tolist()
        order = sorted(range(len(window)), key=lambda place: (-abs(window[place]), place))
        kept = sorted(place for place in order[:KEPT] if window[place] != 0)
        mean = sum(abs(window[place]) for place in kept) / max(len(kept), 1)
        large = {place for place in kept if abs(window[place]) > mean}
        for places in (large, set(kept) - large):
            size = sum(abs(window[place]) for place in sorted(places)) / max(len(places), 1)
            for place in places:
                out[begin + place] = np.copysign(np.float32(size), window[place])
    return torch.from_numpy(out)


def draw(seed, count, kind):
    flat = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "ties":
            flat = (flat * 2).round()
        case "one":
            flat = torch.full((count,), -0.5)
        case "few":
            flat[torch.arange(count) % 300 > 0] = 0
        case "tiny":
            flat *= 1e-42
        case "huge":
            flat = flat.sign() * 3e38
    return flat


movements = st.builds(
    draw,
    st.integers(0, 1 << 30),
    st.sampled_from([0, 1, 47, 48, 4095, 4096, 4097, 9000]),
    st.sampled_from(["normal", "ties", "one", "few", "tiny", "huge"]),
)


@quick
@given(movements)
def test_it_is_what_a_plain_computation_gives(flat):
    out, _ = there_and_back(flat)
    assert out.numpy().tobytes() == plain(flat).numpy().tobytes()


@quick
@given(movements)
def test_what_is_left_shrinks_unless_nothing_is_left(flat):
    out, _ = there_and_back(flat)
    before, after = (float(one.double().square().sum()) for one in (flat, flat.double() - out.double()))
    assert after < before or before == 0


def test_bytes_depend_on_the_number_of_elements_and_not_on_how_they_are_cut():
    flat = torch.randn(AT_ONCE * WINDOW + 3 * WINDOW + 5, generator=torch.Generator().manual_seed(1))
    _, whole = there_and_back(flat)
    _, first = there_and_back(flat[: 2 * WINDOW])
    _, rest = there_and_back(flat[2 * WINDOW :])
    assert bytes(whole) == bytes(first) + bytes(rest)
    assert RECORD.itemsize * 8 / WINDOW == pytest.approx(0.1367, abs=1e-4)
    assert [CODEC.nbytes(count) for count in (0, 1, WINDOW, WINDOW + 1)] == [0, 70, 70, 140]


def test_of_equal_elements_the_first_are_kept():
    out, _ = there_and_back(torch.full((WINDOW,), 3.0))
    assert out.nonzero().flatten().equal(torch.arange(KEPT))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_movement_that_is_not_finite_is_refused(bad):
    flat = torch.zeros(WINDOW + 9)
    flat[WINDOW + 4] = bad
    with pytest.raises(LocalError, match="HP-NUM-002"):
        there_and_back(flat)


def damaged(**fields):
    _, data = there_and_back(draw(3, WINDOW + 100, "normal"))
    record = np.frombuffer(data, RECORD)[1:]
    for name, value in fields.items():
        record[name] = np.frombuffer(value, record[name].dtype) if isinstance(value, bytes) else value
    return data


def unary(places):
    bits = np.zeros(UPPER, np.uint8)
    bits[places] = 1
    return np.packbits(bits).tobytes()


@pytest.mark.parametrize(
    "fields",
    [
        {"sizes": struct.pack("<ff", float("nan"), 1.0)},
        {"sizes": struct.pack("<ff", 1.0, float("inf"))},
        {"sizes": struct.pack("<ff", -1.0, 1.0)},
        {"upper": b"\xff" * (UPPER // 8)},
        {"upper": unary([UPPER - 1])},
        {"upper": unary([0, 1]), "lower": bytes(KEPT * LOWER // 8)},
        {"upper": unary([2]), "lower": bytes(KEPT * LOWER // 8)},
    ],
    ids=["nan", "infinite", "negative", "too many", "beyond the window", "twice", "beyond the end"],
)
def test_damage_is_refused(fields):
    with pytest.raises(ProtocolError, match="HP-WIRE-001"):
        CODEC.decode(damaged(**fields), WINDOW + 100)


@quick
@given(st.binary(min_size=140, max_size=140))
def test_any_bytes_are_elements_or_refused(data):
    try:
        found = CODEC.decode(memoryview(bytearray(data)), WINDOW + 7)
    except ProtocolError:
        return
    assert found.shape == (WINDOW + 7,)
    assert torch.isfinite(found).all()


def test_copies_of_a_tied_parameter_are_encoded_alike_wherever_they_lie():
    shared = draw(5, 3 * WINDOW + 17, "normal")
    vectors = [torch.cat([draw(begin, begin, "normal"), shared, torch.ones(9)]) for begin in (100, 5000)]
    found = []
    for begin, vector in zip((100, 5000), vectors, strict=True):
        uses = ((0, begin, begin + len(shared)), (1, 0, len(shared)))
        ranges = Ties((Tie(uses=uses),)).parts(0, len(vector))
        movement = Movement(1, ranges, lambda i, j, vector=vector: vector[i:j])
        assert len(movement.whole()) == len(vector)
        found.append(movement.written(begin, begin + len(shared)))
        cut = begin + WINDOW
        assert movement.read(cut, cut + WINDOW).equal(movement.whole()[cut : cut + WINDOW])
        for wrong in ((begin + 1, begin + 9), (0, begin + 1), (begin, len(vector))):
            with pytest.raises(CommandError, match="not of whole windows"):
                movement.written(*wrong)
    assert bytes(found[0]) == bytes(found[1])


def test_it_is_of_no_link():
    assert LinkSettings(reduce="topk2").sparse
    assert not LinkSettings(reduce="topk2").lossy, "one machine can compute it again"
    for wrong in ({"codec": "topk2"}, {"backward": "topk2"}, {"codec": "topk-topk2"}):
        with pytest.raises(ValueError, match="unknown codec"):
            LinkSettings(**wrong)
