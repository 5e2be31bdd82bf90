"""Reducers' shares: the busiest uplink ends as soon as the linear program says; slow peers reduce little."""

from hypothesis import given
from hypothesis import strategies as st

from hetpeer.averaging.reduce.reduce_shards import PARTS, ReducerLoad, alike, divide
from tests.amounts import examples


def load(elements, *peers, senders=None):
    return ReducerLoad(elements, frozenset(peers if senders is None else senders), peers)


def seconds(loads, uplinks, shares):
    """When the busiest uplink is done."""
    sent = dict.fromkeys(uplinks, 0.0)
    for block, one in loads.items():
        total = sum(share for _, share in shares[block])
        part = {peer: share / total for peer, share in shares[block]}
        for peer in one.receivers:
            others = len(one.receivers) - 1
            sent[peer] += one.elements * part.get(peer, 0.0) * others
            if peer in one.senders:
                sent[peer] += one.elements * (1 - part.get(peer, 0.0))
    return max(sent[peer] / uplinks[peer] for peer in uplinks)


def least(loads, uplinks):
    """The same by the linear program, over all ways of dividing."""
    names = [(block, peer) for block, one in loads.items() for peer in one.receivers]
    cost = [0.0] * len(names) + [1.0]
    rows, limits = [], []
    for peer, rate in uplinks.items():
        row, given = [0.0] * len(names) + [-rate], 0.0
        for block, one in loads.items():
            if peer in one.receivers:
                row[names.index((block, peer))] = one.elements * (
                    len(one.receivers) - 1 - (peer in one.senders)
                )
                given += one.elements * (peer in one.senders)
        rows.append(row)
        limits.append(-given)
    sums = [[float(name[0] == block) for name in names] + [0.0] for block in loads]
    from scipy.optimize import linprog

    return linprog(cost, rows, limits, sums, [1.0] * len(loads)).fun


def test_equal_lines_share_equally_and_unknown_ones_too():
    for uplinks in ({}, {"a": 7.0, "b": 7.0, "c": 7.0}, {"a": 0.0, "b": 7.0, "c": 0.0}):
        ((_, shares),) = divide({3: load(100, "a", "b", "c")}, uplinks).items()
        assert shares == (("a", PARTS), ("b", PARTS), ("c", PARTS))


def test_lines_that_measure_almost_the_same_are_the_same():
    measured = {"a": 93.0, "b": 97.0, "c": 100.0, "d": 20.0, "e": 0.0, "f": 400.0}
    assert alike(measured) == {"a": 97.0, "b": 97.0, "c": 97.0, "d": 20.0, "e": 0.0, "f": 400.0}
    assert alike({"a": 0.0}) == {"a": 0.0}
    assert alike({}) == {}


def test_a_slow_line_reduces_nothing_and_a_holder_alone_all():
    shares = divide({0: load(100, "a", "b", "c", "d")}, {"a": 20.0, "b": 100.0, "c": 100.0, "d": 100.0})
    assert [peer for peer, _ in shares[0]] == ["b", "c", "d"]
    assert divide({0: load(100, "a"), 1: load(0, "a", "b")}, {"a": 1.0})[0] == (("a", PARTS),)


def test_who_holds_more_reduces_less_of_it():
    loads = {0: load(100, "a", "b", "c"), 1: load(100, "a", "d", "e")}
    shares = {block: dict(one) for block, one in divide(loads, dict.fromkeys("abcde", 1.0)).items()}
    assert shares[0].get("a", 0) < shares[0]["b"] == shares[0]["c"]


def test_where_sums_are_checked_nobody_reduces_almost_all_or_almost_nothing():
    """Whatever is said of uplinks, three others at least receive a part of everybody's."""
    uplinks = {"a": 1e12, "b": 1.0, "c": 1.0, "d": 1.0}
    loads = {0: load(100, *uplinks)}
    assert [peer for peer, _ in divide(loads, uplinks)[0]] == ["a"]
    assert divide(loads, uplinks, guarded=True)[0] == (
        ("a", 2 * PARTS),
        ("b", PARTS // 2),
        ("c", PARTS // 2),
        ("d", PARTS // 2),
    )
    assert divide(loads, {}, guarded=True) == divide(loads, {})


rates = st.floats(1.0, 100.0)


@examples(200)
@given(st.lists(rates, min_size=2, max_size=9))
def test_one_block_is_done_as_soon_as_can_be(lines):
    uplinks = {f"p{n}": rate for n, rate in enumerate(lines)}
    loads = {0: load(1000, *uplinks)}
    assert seconds(loads, uplinks, divide(loads, uplinks)) <= 1.02 * least(loads, uplinks)


@examples(200)
@given(st.data(), st.lists(rates, min_size=3, max_size=8), st.integers(2, 5), st.booleans())
def test_several_blocks_of_uneven_clusters_are_done_almost_as_soon_as_can_be(data, lines, blocks, all_send):
    """Exactly, up to rounding, where every holder has sums; water does not know that who has none pays
    more for reducing.
    """
    uplinks = {f"p{n}": rate for n, rate in enumerate(lines)}
    some = st.lists(st.sampled_from(sorted(uplinks)), min_size=1, max_size=len(uplinks), unique=True)
    loads = {}
    for block in range(blocks):
        receivers = data.draw(some)
        senders = (
            None if all_send else data.draw(st.lists(st.sampled_from(receivers), min_size=1, unique=True))
        )
        loads[block] = load(data.draw(st.integers(100, 1000)), *receivers, senders=senders)
    found, best = seconds(loads, uplinks, divide(loads, uplinks)), least(loads, uplinks)
    assert best * 0.999 <= found <= best * (1.02 if all_send else 1.3)
