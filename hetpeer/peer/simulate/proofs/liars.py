"""What a simulated volunteer does wrong on purpose, in a reduce and where it computes (sim_config.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.norm_outliers import ENOUGH
from hetpeer.bootstrap.state.failed_microbatches import MAX_FAILURES
from hetpeer.peer.simulate.sim_numerics import Numerics
from hetpeer.stages.block.fingerprint import pack, unpack

FLIPPED = 7
"""Which of the states that it has made has a wrong bit, where its memory errs once."""
IDS = 16
"""More than a step has."""
HUGE = 1e290
"""Of a sum, squared: beside it nothing is left of others."""
SPOILT = "spoilt"
"""In the place of a part or a sum: numbers that are none, or too few."""


class Lying:
    """Of volunteer `name`, whose `lies` are told."""

    def __init__(self, name: str, numerics: Numerics, lies: frozenset[str]) -> None:
        self._name = name
        self._numerics = numerics
        self._lies = lies
        self._made = 0

    def failures(self, step: e.StepId) -> list[e.Tell]:
        """What it says that it cannot compute: everything, as often as it is heard. Or, of everything, that it is others' doing, and once its own."""
        given: list[str] = []
        if "fails" in self._lies:
            given = [self._name] * MAX_FAILURES
        elif "blames" in self._lies:
            given = [self._name, "v0", "v1"]
        return [
            e.Tell(m.Failed(line=step.line, step=step.number, why="it says so", id=microbatch, given=culprit))
            for microbatch in range(IDS)
            for culprit in given
        ]

    def objects(self, work: e.SumParts) -> int | None:
        """The place of somebody else's part that it says cannot be added."""
        others = [place for place, holder in enumerate(work.holders) if holder != self._name]
        return others[0] if "objects" in self._lies and others else None

    def added(self, value: Any, *, exact: bool) -> Any:
        """A sum that it has made; `exact`: of gradients."""
        if "spoils" in self._lies:
            return SPOILT
        return self._numerics.lie(value, "a reducer") if "adds" in self._lies and exact else value

    def claimed(self, value: Any) -> Any:
        """What it says that it has sent."""
        return self._numerics.lie(value, "a sender") if "frames" in self._lies else value

    def covered(self, value: Any, reducer: str) -> Any:
        """What it says that it has sent of a share, where it is not the whole that is looked at."""
        covers = "covers" in self._lies and reducer == self._name
        return self._numerics.lie(value, "a reducer") if covers else value

    def got(self, value: Any) -> Any:
        """What it says that it has got."""
        return self._numerics.lie(value, "a holder") if "disowns" in self._lies else value

    def testified(self, received: tuple[m.Receipt, ...]) -> tuple[m.Receipt, ...]:
        """What it says that it has received."""
        if "perjures" not in self._lies:
            return received
        return tuple(
            one.model_copy(
                update={"mark": one.mark.model_copy(update={"values": pack(2 * unpack(one.mark.values))})}
            )
            for one in received
            if one.peer != self._name
        )

    @property
    def keeps(self) -> bool:
        """Whether its own parts stay with it."""
        return "keeps" in self._lies

    def made(self, state: Any) -> Any:
        """A block's state after an update."""
        self._made += 1
        false = "alters" in self._lies or ("flips" in self._lies and self._made == FLIPPED)
        return self._numerics.lie(state, "a holder") if false else state

    def saved(self, state: Any) -> Any:
        """What it gives of it for a checkpoint."""
        return self._numerics.lie(state, "a saver") if "saves" in self._lies else state

    @property
    def hurries(self) -> bool:
        """Whether it says what has come of an update before anybody else does."""
        return bool(self._lies & {"alters", "flips"})

    def gives(self, to: str) -> bool:
        """Whether `to` gets that sum."""
        return to == self._name or "withholds" not in self._lies

    def given(self, to: str, value: Any) -> Any:
        """What `to` gets in its place."""
        tears = "tears" in self._lies and to != self._name
        return self._numerics.lie(value, f"a reducer to {to}") if tears else value

    def voted(
        self, step: int, vote: m.BlockVote, looks: Sequence[e.Look]
    ) -> tuple[m.BlockVote, Sequence[e.Look]]:
        """What it says in `step` of what has come."""
        if "inflates" in self._lies and step >= ENOUGH:
            return vote.model_copy(update={"squared_norm": HUGE}), looks
        if not self._lies & {"votes", "denies"}:
            return vote, looks
        if "denies" in self._lies:
            looks = [dataclasses.replace(look, digest=f"not {look.digest}") for look in looks]
        return vote.model_copy(update={"digest": "false"}), looks
