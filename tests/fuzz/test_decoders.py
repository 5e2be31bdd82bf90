"""Every decoder of bytes from outside lets through what it should, and refuses all else by the error that
it promises.

Seeds are changed at random here, a little each time; `make fuzz` goes on where this ends, and leaves what it
finds in corpus/.
"""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.amounts import examples
from tests.fuzz.mutations import mutated
from tests.fuzz.target import CORPUS, attempt, kept
from tests.fuzz.targets import every

TARGETS = every()
EXAMPLES = 150
FEW = {"stages/graph-run": 30}
"""Of a decoder that computes."""
MAX_CORPUS = 500 << 10

names = pytest.mark.parametrize("name", TARGETS)


@cache
def pool(name: str) -> list[bytes]:
    return [*TARGETS[name].seeds(), *kept(name)]


def tried(name: str, data: bytes) -> str:
    try:
        return attempt(TARGETS[name], data)
    except Exception as error:
        error.add_note(f"{name}: {data.hex()}")
        raise


@names
def test_what_is_written_in_earnest_is_let_through(name: str) -> None:
    seeds = list(TARGETS[name].seeds())
    assert seeds
    for seed in seeds:
        assert tried(name, seed).startswith("sound")


@names
def test_what_was_found_once_breaks_nothing(name: str) -> None:
    for data in kept(name):
        tried(name, data)


@names
def test_whatever_else_comes_is_refused_or_sound(name: str) -> None:
    target = TARGETS[name]

    @examples(FEW.get(name, EXAMPLES))
    @given(st.integers(0, 2**64 - 1))
    def changed(seed: int) -> None:
        random = Random(seed)
        tried(name, mutated(random.choice(pool(name)), random, pool(name))[: target.max_len])

    @examples(FEW.get(name, EXAMPLES) // 2)
    @given(st.binary(max_size=200))
    def anything(data: bytes) -> None:
        tried(name, data)

    changed()
    anything()


def test_the_corpus_is_of_these_and_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {str(path.parent.relative_to(CORPUS)) for path in files} <= TARGETS.keys()
    assert sum(path.stat().st_size for path in files) <= MAX_CORPUS
