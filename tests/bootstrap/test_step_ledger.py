"""The ledger of a step: every id counts exactly once per block, or it is open."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.averaging.messages import Contents
from hetpeer.bootstrap.coordinator.step_ledger import StepLedger, clip_coefficient

IDS, BLOCKS = range(6), 3
LOSSES = dict.fromkeys(IDS, 1.0)


def contents(ids, begin=0, end=BLOCKS):
    return (Contents(begin=begin, end=end, ids=tuple(ids)),)


def ledger():
    return StepLedger(IDS, (), BLOCKS)


def test_disjoint_reports_fill_the_cover_block_by_block():
    books = ledger()
    assert books.report("a", 0, contents((0, 1, 2)), LOSSES).progress
    assert books.report("b", 0, contents((3, 4, 5), 0, 2), LOSSES).refused == ()
    assert books.undone() == {3, 4, 5}
    books.report("c", 0, contents((3, 4, 5), 2, 3), LOSSES)
    assert books.complete()
    assert books.covers() == {
        0: (("a", (0, 1, 2)), ("b", (3, 4, 5))),
        1: (("a", (0, 1, 2)), ("b", (3, 4, 5))),
        2: (("a", (0, 1, 2)), ("c", (3, 4, 5))),
    }


def test_of_two_that_overlap_the_smaller_is_dropped_and_reopened():
    books = ledger()
    books.report("a", 0, contents((0, 1, 2)), LOSSES)
    verdict = books.report("b", 0, contents((2, 3)), LOSSES)
    assert (verdict.refused, verdict.evicted, verdict.reopened) == ((0, 1, 2), {}, {3})
    verdict = books.report("b", 1, contents((2, 3, 4, 5)), LOSSES)
    assert (verdict.refused, verdict.evicted) == ((), {"a": [0, 1, 2]})
    assert verdict.reopened == {0, 1}
    assert books.undone() == {0, 1}


def test_a_tie_keeps_what_is_counted():
    books = ledger()
    books.report("a", 0, contents((0, 1)), LOSSES)
    assert books.report("b", 0, contents((1, 2)), LOSSES).refused == (0, 1, 2)


def test_a_report_that_overlaps_several_must_outweigh_them_together():
    books = ledger()
    books.report("a", 0, contents((0, 1)), LOSSES)
    books.report("b", 0, contents((2, 3)), LOSSES)
    assert books.report("c", 0, contents((1, 2, 4, 5)), LOSSES).refused == (0, 1, 2)
    verdict = books.report("c", 1, contents((0, 1, 2, 4, 5)), LOSSES)
    assert verdict.evicted == {"a": [0, 1, 2], "b": [0, 1, 2]}
    assert books.undone() == {3}


def test_a_slot_that_is_reported_again_gets_the_same_answer():
    books = ledger()
    books.report("a", 0, contents((0, 1)), LOSSES)
    first = books.report("b", 0, contents((1,)), LOSSES)
    again = books.report("b", 0, contents((5,)), LOSSES)
    assert again.refused == first.refused == (0, 1, 2)
    assert not again.progress
    assert 5 in books.undone()


def test_ids_and_blocks_that_do_not_exist_are_never_counted():
    books = ledger()
    assert books.report("a", 0, contents((0, 99)), LOSSES).refused == (0, 1, 2)
    assert books.report("a", 1, contents((0,), 1, 50), LOSSES).refused == ()
    assert books.undone() == set(IDS)


def test_an_id_of_the_holders_own_is_not_counted_twice():
    books = ledger()
    books.report("a", 0, contents((0,)), LOSSES)
    assert books.report("a", 1, contents((0, 1, 2)), LOSSES).refused == (0, 1, 2)


def test_what_a_lost_holder_counted_is_open_again():
    books = ledger()
    books.report("a", 0, contents(IDS), LOSSES)
    assert books.lose("a")
    assert books.undone() == set(IDS)
    assert not books.lose("a")


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.frozensets(st.sampled_from(list(IDS)), min_size=1),
            st.integers(0, BLOCKS - 1),
            st.integers(1, BLOCKS),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_books_are_always_what_was_accepted_and_never_double(events):
    """Against a model: each holder's accepted slots, block by block, as it keeps them itself."""
    books = ledger()
    sums = {}
    for slot, (holder, ids, begin, width, dies) in enumerate(events):
        end = min(BLOCKS, begin + width)
        if dies:
            books.lose(holder)
            sums = {key: held for key, held in sums.items() if key[0] != holder}
            continue
        before = [len(counted) for counted in books._counted]
        verdict = books.report(holder, slot, contents(sorted(ids), begin, end), LOSSES)
        for rival, blocks in verdict.evicted.items():
            for block in blocks:
                del sums[rival, block]
        for block in set(range(begin, end)) - set(verdict.refused):
            sums.setdefault((holder, block), set()).update(ids)
        for block, counted in enumerate(books._counted):
            held = [(i, h) for (h, b), s in sums.items() if b == block for i in s]
            assert sorted(held) == sorted(counted.items())
            grew = block in range(begin, end) and block not in verdict.refused
            assert len(counted) >= before[block] + grew
        done = set.intersection(*(set(counted) for counted in books._counted))
        assert books.undone() == set(IDS) - done


def test_losses_come_from_whoever_counts_at_the_last_block():
    books = StepLedger(range(2), range(2, 4), 1)
    books.report("a", 0, contents((0,), 0, 1), {0: 1.0})
    books.report("b", 0, contents((1,), 0, 1), {0: 99.0, 1: 2.0})
    assert books.train_loss({0: 1, 1: 1}) == 1.5
    assert books.evaluated({2: 4.0, 3: 6.0, 0: 5.0}, {2: (1, 4), 3: (2, 3), 0: (9, 9)})
    assert not books.evaluated({2: 100.0}, {2: (4, 4)})
    assert books.evaluation_hits() == (3, 7)
    assert books.evaluation_loss({2: 1, 3: 1}) == 5.0
    assert books.evaluation_loss({2: 1, 3: 3}) == 5.5
    assert books.complete()


@pytest.mark.parametrize("hits", [{}, {2: (1, 4)}, {2: (0, 0), 3: (0, 0)}, {2: (1, 4), 3: (2, 1)}])
def test_hits_that_are_not_of_all_targets_are_none(hits):
    books = StepLedger(range(2), range(2, 4), 1)
    assert books.evaluated({2: 4.0, 3: 6.0}, hits)
    assert books.evaluation_hits() is None
    books.skip(2)
    books.skip(3)
    assert books.evaluation_hits() is None


def test_what_has_no_loss_does_not_count_where_losses_are():
    books = StepLedger(range(2), (), 2)
    verdict = books.report("a", 0, contents((0, 1), 0, 2), {0: 1.0, 99: 7.0})
    assert verdict.refused == (1,)
    assert verdict.reopened == {0, 1}
    assert not books.complete()
    books.report("b", 0, contents((0, 1), 1, 2), {0: 1.0, 1: 3.0})
    assert books.complete()
    assert books.train_loss({0: 1, 1: 1}) == 2.0


def test_the_mean_is_over_samples_not_over_microbatches():
    books = StepLedger(range(3), (), 1)
    books.report("a", 0, contents((0, 1, 2), 0, 1), {0: 1.0, 1: 2.0, 2: 9.0})
    assert books.train_loss({0: 4, 1: 4, 2: 2}) == (4 * 1.0 + 4 * 2.0 + 2 * 9.0) / 10


@pytest.mark.parametrize("maximum", [0.5, 1e6])
def test_clipping_is_torchs(maximum):
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(3)) * 7
    theirs = torch.zeros(1000, requires_grad=True)
    theirs.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([theirs], maximum, foreach=False)
    ours = gradient * clip_coefficient(float(norm), maximum)
    assert torch.allclose(ours, theirs.grad, rtol=3e-7, atol=0)


def test_small_gradients_and_no_limit_are_not_scaled():
    assert clip_coefficient(0.9, 1.0) == clip_coefficient(0.0, 1.0) == clip_coefficient(7.0, None) == 1.0
