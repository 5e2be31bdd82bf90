"""Whose links are kept beside those of the step.

What is asked for on the task board, and what is not any more.
"""

import asyncio
from collections.abc import Callable, Iterable

from hetpeer.averaging.effects import StepId
from hetpeer.averaging.messages import TermView
from hetpeer.dht.discovery import LeftoverIds, TaskNote
from hetpeer.peer.training.step_entry import KEPT, LeftoverWatch, LinkedPeers

PLACE = (2, 4)


def test_who_exchanges_parameters_with_us_stays_known_and_who_only_takes_part_does_not():
    known = LinkedPeers()
    known.averages({"me": PLACE, "a": (0, 3), "b": (3, 6), "c": (0, 2), "d": (4, 6)}, PLACE)
    assert set(known) == {"me", "a", "b", "c", "d"}
    known.averages({"me": PLACE, "e": PLACE}, PLACE)
    assert set(known) == {"me", "a", "b", "e"}


def test_who_leaves_is_forgotten():
    known = LinkedPeers()
    known.averages({"a": PLACE, "b": PLACE, "c": (0, 2)}, PLACE)
    known.forget(["a", "c"])
    assert set(known) == {"b"}


def test_so_many_are_kept_and_those_met_longest_ago_are_not():
    known = LinkedPeers()
    for number in range(KEPT):
        known.averages({f"{number}": PLACE}, PLACE)
    known.averages({"0": PLACE}, PLACE)
    known.averages({"new": PLACE}, PLACE)
    assert set(known) == {"new", *map(str, range(KEPT))} - {"1"}


def test_without_a_place_nobody_is_met():
    known = LinkedPeers()
    known.averages({"a": PLACE}, None)
    known.averages({"b": PLACE}, None)
    assert set(known) == {"b"}


STEP = StepId(TermView(term=2, view=1), 5, entry=1)


class Holder:
    """Somebody who came into a step while it ran, and has nothing to do; `asked` is whom it has asked."""

    def __init__(self) -> None:
        self.step: StepId | None = STEP
        self.place: tuple[int, int] | None = (2, 4)
        self.is_idle = True
        self.partners = {"sender"}
        self.asked: list[tuple[str, int]] = []

    def leftovers(self) -> dict[int, tuple[int, ...]]:
        return {}

    def ask(self, sender: str, found: LeftoverIds) -> None:
        assert self.step is not None
        self.asked.append((sender, found.border))


class ReadBoard:
    """A board whose reading takes a while, in which `meanwhile` happens."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile

    async def read(self, _borders: Iterable[int]) -> dict[str, list[TaskNote]]:
        await asyncio.sleep(0)
        self._meanwhile()
        left = tuple(LeftoverIds(border=border, ids=(1,)) for border in (1, 2, 4))
        notes = [TaskNote(term=2, view=1, step=step, leftovers=left) for step in (4, 5)]
        return {"sender": notes, "me": notes}


async def looked(holder: Holder, meanwhile: Callable[[], None]) -> list[tuple[str, int]]:
    watch = LeftoverWatch("me", ReadBoard(meanwhile), holder, holder, 8)  # type: ignore[arg-type]
    await watch._look(0.0)
    return holder.asked


async def test_who_keeps_work_of_this_step_for_our_blocks_is_asked() -> None:
    assert await looked(Holder(), lambda: None) == [("sender", 2)]


async def test_strangers_and_ids_that_no_step_has_are_passed_over() -> None:
    holder = Holder()
    holder.partners = {"somebody else"}
    assert await looked(holder, lambda: None) == []
    known = Holder()
    board = ReadBoard(lambda: None)
    watch = LeftoverWatch("me", board, known, known, 1)  # type: ignore[arg-type]
    await watch._look(0.0)
    assert known.asked == [], "microbatch 1 is none of a step with one"


async def test_nobody_is_asked_for_a_step_that_ended_while_the_board_was_read() -> None:
    holder = Holder()

    def ended() -> None:
        holder.step = None

    assert await looked(holder, ended) == []
