"""Slot bookkeeping against the rules of docs/protocol.md, step 3."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hetpeer.stages.pipeline.gradient_slots import Drop, GradientSlots, Merge
from tests.amounts import examples

BLOCKS = range(3)


def test_a_full_slot_is_sealed_and_merged_into_the_accepted_one():
    book = GradientSlots(capacity=2)
    assert book.fold(7, BLOCKS) == (0, (0, 1, 2))
    assert not book.should_seal(lambda: False)
    assert book.fold(8, (0,)) == (0, (0,))
    assert book.should_seal(lambda: False)
    assert not book.can_fold()
    assert book.seal() == (0, {0: (7, 8), 1: (7,), 2: (7,)})
    assert book.settle(0, ()) == []
    assert book.accepted() == 0
    book.fold(9, BLOCKS)
    book.seal()
    assert book.settle(1, (1,)) == [Drop(1, 1), Merge(0, 1, 0), Merge(2, 1, 0)]
    assert book.contents() == {0: {0: {7, 8, 9}, 1: {7}, 2: {7, 9}}}


def test_an_id_is_folded_only_where_no_live_slot_holds_it():
    book = GradientSlots(capacity=1)
    book.fold(7, (0, 1))
    book.seal()
    assert book.fold(7, BLOCKS) == (1, (2,))


def test_an_idle_holder_seals_what_it_has_but_nothing_empty():
    book = GradientSlots(capacity=4)
    assert not book.should_seal(lambda: True)
    book.fold(7, BLOCKS)
    assert book.should_seal(lambda: True)
    book.seal()
    book.fold(7, BLOCKS)
    assert not book.should_seal(lambda: True)


def test_a_spoiled_slot_and_an_evicted_block_are_dropped():
    book = GradientSlots(capacity=4)
    assert book.spoil() == ([], set())
    book.fold(7, (0, 1))
    book.fold(8, (1,))
    assert book.spoil() == ([Drop(0, 0), Drop(1, 0)], {7, 8})
    assert book.evict(0) == []
    book.fold(7, BLOCKS)
    book.seal()
    book.settle(1, ())
    assert book.evict(2) == [Drop(2, 1)]
    assert not book.holds(7, 2)


class Sums(RuleBasedStateMachine):
    """The tensors that a worker would keep, told only by effects: they must always be what the book says."""

    @initialize(capacity=st.integers(1, 4))
    def open(self, capacity):
        self.book = GradientSlots(capacity)
        self.capacity = capacity
        self.sums = {}
        self.sealed = None

    def carry_out(self, effects):
        for effect in effects:
            match effect:
                case Drop(block, slot):
                    del self.sums[slot, block]
                case Merge(block, source, target):
                    added = self.sums.pop((source, block))
                    self.sums[target, block] = self.sums.get((target, block), ()) + added

    @precondition(lambda self: self.book.can_fold())
    @rule(microbatch=st.integers(0, 5), begin=st.integers(0, 2), width=st.integers(1, 3))
    def fold(self, microbatch, begin, width):
        slot, blocks = self.book.fold(microbatch, BLOCKS[begin : begin + width])
        for block in blocks:
            self.sums[slot, block] = (*self.sums.get((slot, block), ()), microbatch)

    @precondition(lambda self: self.book.should_seal(lambda: True))
    @rule()
    def seal(self):
        self.sealed, ids = self.book.seal()
        assert ids
        assert ids == {b: s for (n, b), s in self.sums.items() if n == self.sealed}, "in the order of adding"

    @precondition(lambda self: self.sealed is not None)
    @rule(refused=st.sets(st.sampled_from(list(BLOCKS))))
    def settle(self, refused):
        self.carry_out(self.book.settle(self.sealed, refused))
        assert self.book.settle(self.sealed, refused) == []
        self.sealed = None

    @rule(block=st.sampled_from(list(BLOCKS)))
    def evict(self, block):
        self.carry_out(self.book.evict(block))

    @rule()
    def spoil(self):
        self.carry_out(self.book.spoil()[0])

    @invariant()
    def sums_are_what_the_book_says(self):
        told = {(n, b): ids for n, held in self.book.contents().items() for b, ids in held.items() if ids}
        assert {key: sorted(ids) for key, ids in told.items()} == {k: sorted(s) for k, s in self.sums.items()}

    @invariant()
    def at_most_three_live_slots_and_no_id_twice(self):
        for block in BLOCKS:
            assert sum(block in held for held in self.book.contents().values()) <= 3
            ids = [i for (_, b), held in self.sums.items() if b == block for i in held]
            assert len(ids) == len(set(ids))


TestSums = Sums.TestCase
TestSums.settings = examples(60, stateful_step_count=40)
