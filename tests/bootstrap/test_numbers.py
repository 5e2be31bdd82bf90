"""A set of numbers, beside Python's own."""

from hypothesis import given
from hypothesis import strategies as st

from hetpeer.bootstrap.numbers import Numbers

NUMBERS = st.sets(st.integers(0, 200))


@given(NUMBERS, NUMBERS, NUMBERS)
def test_it_is_the_set_that_it_says(some: set[int], gone: set[int], others: set[int]) -> None:
    numbers = Numbers(some)
    for number in gone:
        numbers.discard(number)
    left = some - gone
    assert numbers == left
    assert sorted(left) == list(numbers)
    assert len(numbers) == len(left)
    assert all((number in numbers) == (number in left) for number in range(-2, 300))
    assert numbers - others == left - others
    assert others - numbers == others - left
