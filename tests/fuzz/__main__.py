"""One decoder, by name (tests/fuzz/targets.py): tried with files, or fuzzed by atheris.

What becomes of the bytes of files, with a traceback if that is wrong:

    python -m tests.fuzz bootstrap/run/manifest FILE…

With libFuzzer's flags and folders (`pip install 'hetpeer[fuzz]'`):

    python -m tests.fuzz bootstrap/run/manifest -- -runs=10000
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutations import mutated

TREES = 0.6
"""Of what is tried, so much is made by mutations.py, which knows msgpack and JSON, and the rest by
libFuzzer.
"""
RECENT = 200
"""Inputs of which parts may be put into others."""
OUTCOMES = 500
"""Different ones that are told from each other."""


def replay(name: str, files: Sequence[str]) -> int:
    """Tell what the decoder does with each file."""
    from tests.fuzz.target import attempt
    from tests.fuzz.targets import room

    target = room(name.partition("/")[0])[name]
    for file in files:
        print(f"{file}: {attempt(target, Path(file).read_bytes())}")
    return 0


def fuzz(name: str, flags: Sequence[str]) -> None:
    """The first folder among the flags is given the seeds, and what is kept.

    Does not return: libFuzzer ends the process.
    """
    import atheris  # type: ignore[import-not-found]

    with atheris.instrument_imports(include=["hetpeer", "multiaddr"]):
        import multiaddr  # noqa: F401 - else it would come later, with the first address

        from tests.fuzz.targets import room

        targets = room(name.partition("/")[0])
    from tests.fuzz.target import attempt, ending, kept

    target, told = targets[name], _Outcomes(atheris)
    pool = [*target.seeds(), *kept(name)]
    for folder in [Path(flag) for flag in flags if not flag.startswith("-")][:1]:
        for number, seed in enumerate(pool):
            (folder / f"seed-{number:03}").write_bytes(seed)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() > TREES:
            changed: bytes = atheris.Mutate(data, most)
            return changed
        if len(pool) < RECENT and data not in pool:
            pool.append(data)
        return mutated(data or random.choice(pool), random, pool)[:most]

    def once(data: bytes) -> None:
        told(ending(attempt(target, data)))

    fixed = [f"-max_len={target.max_len}", "-mutate_depth=1"]  # a change of ours may be several
    atheris.Setup([sys.argv[0], *fixed, *flags], once, custom_mutator=mutate)
    atheris.Fuzz()


class _Outcomes:
    """Tells libFuzzer how decoding ended: pydantic and msgpack are compiled, and which field was wrong is
    all that can be seen of them.
    """

    def __init__(self, atheris: Any) -> None:
        self._atheris = atheris
        self._free = [atheris._reserve_counter() for _ in range(OUTCOMES)]
        self._counters: dict[str, int] = {}

    def __call__(self, kind: str) -> None:
        if kind not in self._counters and self._free:
            self._counters[kind] = self._free.pop()
        if kind in self._counters:
            self._atheris._trace_branch(self._counters[kind])


def main() -> int:
    name, *rest = sys.argv[1:] or [""]
    if not name:
        print(__doc__)
        return 2
    if rest[:1] == ["--"]:
        fuzz(name, rest[1:])
    return replay(name, rest)


if __name__ == "__main__":
    sys.exit(main())
