"""False sums of four kinds, of a volunteer that is honest otherwise: what spot checks are to find
(docs/trust.md).

    python -m tests.hostile.lies FILE join …

They are finite and of the right size, and everybody gets the same, the liar included; in proofs of sums it
says that this is what it has sent. Who lies, and how, FILE says: lines of a peer's id and a kind. Nobody does
before three others hold all the same blocks: where nobody could be found out there is nothing to be measured.
Each step in which it lies is a line on its stderr.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetpeer.stages.block.fingerprint import fingerprint, pack
from hetpeer.stages.ipc.worker_messages import Marked
from hetpeer.stages.pipeline.gradient_slots import CHECKS

Vector = NDArray[np.float32]

OTHERS = 3
"""Who check it, and decide."""
NOISE = np.random.default_rng(0)
SAID = re.compile(r"^a lie in step (\d+)$", re.MULTILINE)


def _noise(sums: Vector, _before: Vector) -> Vector:
    """Of the same norm: nobody needs to compute anything to make it, and no bound on norms finds it."""
    return NOISE.normal(0.0, np.sqrt(np.mean(sums**2)), sums.shape).astype(np.float32)


LIES: dict[str, Callable[[Vector, Vector], Vector]] = {
    "opposite": lambda sums, _before: -sums,
    "tenfold": lambda sums, _before: 10.0 * sums,
    "noise": _noise,
    "stale": lambda _sums, before: before,
}
"""Kind → what is sent in place of the sums, and of those of the step before."""


class Liar:
    """What one volunteer sends in place of its sums.

    `kind_of` says of its id how it lies now; empty: not at all.
    """

    def __init__(self, kind_of: Callable[[str], str]) -> None:
        self._kind_of = kind_of
        self._plans: dict[tuple[int, int], str] = {}
        """(step, plan) in which it lies → how."""
        self._sums: dict[int, dict[int, Vector]] = {}
        """Block → step → the true sums of the last two steps in which there were any, as far as they were
        sent; else zeros.
        """
        self._told = -1
        self._sent: dict[tuple[int, int], Vector] = {}
        """(block, step) → what was sent in their place."""

    def planned(self, me: str, message: Any) -> None:
        """A plan has come."""
        kind = self._kind_of(me)
        if kind and min(len(cover.receivers) for cover in message.covers) > OTHERS:
            self._plans[message.step, message.plan] = kind

    def sends(self, head: Any, sums: Vector, elements: int) -> None:
        """Put what is sent in the place of `sums`, a part of a block of so many `elements`.

        Before its second step it is honest: nothing is stale.
        """
        steps = self._sums.setdefault(head.block, {})
        place = slice(head.begin, head.end)
        if head.step not in steps:
            for past in list(steps)[:-1]:
                del steps[past]
            steps[head.step] = np.zeros(elements, np.float32)
        steps[head.step][place] = sums
        kind = self._plans.get((head.step, head.plan))
        if kind is None or len(steps) < 2:
            return
        sums[:] = LIES[kind](sums.copy(), next(iter(steps.values()))[place])
        self._sent = {sent: vector for sent, vector in self._sent.items() if sent[1] >= head.step - 1}
        self._sent.setdefault((head.block, head.step), np.zeros(elements, np.float32))[place] = sums
        if head.step != self._told:
            self._told = head.step
            print(f"a lie in step {head.step}", file=sys.stderr, flush=True)

    def says(self, step: int, mark: Any) -> Any:
        """`mark` as it is of what was sent, in a proof; None: of the truth."""
        sent = self._sent.get((mark.block, step))
        if sent is None:
            return None
        values = fingerprint(sent[mark.begin : mark.end], mark.block, mark.begin, mark.key)
        return Marked(marks=pack(values))


def install(kind_of: Callable[[str], str]) -> None:
    """Change this process: it lies as `kind_of` says of its id."""
    from hetpeer.averaging.member.step_vote import StepVote
    from hetpeer.peer.training.check_answers import SumProofAnswers
    from hetpeer.peer.transport.data_plane import DataPlane

    liar, plan, send, look = Liar(kind_of), StepVote.plan, DataPlane.send, SumProofAnswers._slot

    def planned(self: Any, message: Any) -> Any:
        liar.planned(self._me, message)
        return plan(self, message)

    def sends(self: Any, peer: str, head: Any, tensor: Any) -> None:
        if head.kind == "part":
            sums = np.frombuffer(self._store.view(tensor), np.float32)
            liar.sends(head, sums, self._schema.elements(head.block))
        send(self, peer, head, tensor)

    async def looks(self: Any, step: Any, slot: int, mark: Any) -> Any:
        said = None if slot >= CHECKS else liar.says(step.number, mark)
        return await look(self, step, slot, mark) if said is None else said

    StepVote.plan, DataPlane.send, SumProofAnswers._slot = planned, sends, looks  # type: ignore[method-assign, assignment]


def told_in(path: Path) -> Callable[[str], str]:
    """Who lies how, as the file at `path` says by then."""
    return lambda peer: dict(map(str.split, path.read_text().splitlines())).get(peer, "")


def tell(path: Path, kinds: Mapping[str, str]) -> None:
    """From now on these lie."""
    fresh = path.with_suffix(".fresh")
    fresh.write_text("".join(f"{peer} {kind}\n" for peer, kind in kinds.items()))
    fresh.rename(path)


if __name__ == "__main__":
    from hetpeer.peer.cli.main import run

    install(told_in(Path(sys.argv.pop(1))))
    run()
