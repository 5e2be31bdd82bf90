"""Lies that a simulated volunteer tells in a reduce and where it computes; config.py lists their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.outliers import ENOUGH
from hetpeer.bootstrap.coordinator.step_failures import MAX_FAILURES
from hetpeer.peer.simulate.sim_hooks import UNUSABLE, SimConduct
from hetpeer.stages.block.fingerprint import pack, unpack
from tests.simulation.checked_symbols import CheckedNumerics

FLIPPED = 7
"""The state with a wrong bit, counted from 1, if memory errs once."""
IDS = 16
"""More microbatches than a step has."""
HUGE = 1e290
"""Squared norm beside which nothing is left of other sums."""


class LyingConduct(SimConduct):
    """Conduct of volunteer `name`, which tells `lies`."""

    def __init__(self, name: str, numerics: CheckedNumerics, lies: frozenset[str]) -> None:
        self._name = name
        self._numerics = numerics
        self.lies = lies
        self._made = 0

    def failures(self, step: e.StepId) -> list[e.Tell]:
        """Every microbatch is reported as failed: as its own failure, as often as it is heard; or as that of
        others, and once its own.
        """
        given: list[str] = []
        if "fails" in self.lies:
            given = [self._name] * MAX_FAILURES
        elif "blames" in self.lies:
            given = [self._name, "v0", "v1"]
        return [
            e.Tell(m.Failed(line=step.line, step=step.number, why="it says so", id=microbatch, given=culprit))
            for microbatch in range(IDS)
            for culprit in given
        ]

    def objects(self, work: e.SumParts) -> int | None:
        """Index of the first part of somebody else."""
        others = [place for place, holder in enumerate(work.holders) if holder != self._name]
        return others[0] if "objects" in self.lies and others else None

    def sum_made(self, value: Any, *, exact: bool) -> Any:
        if "spoils" in self.lies:
            return UNUSABLE
        return self._numerics.lie(value, "a reducer") if "adds" in self.lies and exact else value

    def claimed(self, value: Any) -> Any:
        """Sum that it claims to have sent."""
        return self._numerics.lie(value, "a sender") if "frames" in self.lies else value

    def covered(self, value: Any, reducer: str) -> Any:
        """Part of a share that it claims to have sent, if only a piece of the share is asked for."""
        covers = "covers" in self.lies and reducer == self._name
        return self._numerics.lie(value, "a reducer") if covers else value

    def got(self, value: Any) -> Any:
        """Sum that it claims to have received."""
        return self._numerics.lie(value, "a holder") if "disowns" in self.lies else value

    def testified(self, received: tuple[m.Receipt, ...]) -> tuple[m.Receipt, ...]:
        """Receipts that it shows as a witness."""
        if "perjures" not in self.lies:
            return received
        return tuple(
            one.model_copy(
                update={"mark": one.mark.model_copy(update={"values": pack(2 * unpack(one.mark.values))})}
            )
            for one in received
            if one.peer != self._name
        )

    def sends_parts(self) -> bool:
        return "keeps" not in self.lies

    def state_made(self, state: Any) -> Any:
        self._made += 1
        false = "alters" in self.lies or ("flips" in self.lies and self._made == FLIPPED)
        return self._numerics.lie(state, "a holder") if false else state

    def state_saved(self, state: Any) -> Any:
        return self._numerics.lie(state, "a saver") if "saves" in self.lies else state

    def applies_at_once(self) -> bool:
        """A liar about states reports an update before anybody else does."""
        return bool(self.lies & {"alters", "flips"})

    def sends_result(self, to: str) -> bool:
        return to == self._name or "withholds" not in self.lies

    def result_sent(self, to: str, value: Any) -> Any:
        tears = "tears" in self.lies and to != self._name
        return self._numerics.lie(value, f"a reducer to {to}") if tears else value

    def voted(
        self, step: int, vote: m.BlockVote, looks: Sequence[e.Look]
    ) -> tuple[m.BlockVote, Sequence[e.Look]]:
        if "inflates" in self.lies and step >= ENOUGH:
            return vote.model_copy(update={"squared_norm": HUGE}), looks
        if not self.lies & {"votes", "denies"}:
            return vote, looks
        if "denies" in self.lies:
            looks = [dataclasses.replace(look, digest=f"not {look.digest}") for look in looks]
        return vote.model_copy(update={"digest": "false"}), looks
