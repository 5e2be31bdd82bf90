"""Fifteen histories that show the protocol at work, each with what to look for."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.config import HistoryConfig
from tests.simulation.transcripts.scribe import WIDTH, written

LIMIT_S = 900.0
MOST_LINES = 80
Twist = Callable[[CheckedSwarm], None]
"""Arranges what befalls a swarm, before it runs."""

TWO_STAGES = (((0, 2), (2, 4)),)
ONE_STAGE = (((0, 4),),)
OMITTED = "     …"
MOVE = Arrangement([TWO_STAGES[0], TWO_STAGES[0]], {"v0": (0, (0, 2)), "v1": (0, (2, 4)), "v2": (1, (2, 4))})
"""Asks v2 to go to blocks 2-3."""
PAIR = HistoryConfig(
    volunteers=2,
    layouts=TWO_STAGES,
    steps=2,
    microbatches=2,
    evaluation_microbatches=0,
    slot_capacity=2,
    checkpoint_every=100,
    latency_s=(0.05, 0.05),
    speeds=(1.0,),
    duplicates=0.0,
    seats=((0, 0), (0, 2), (0, 0), (0, 2)),
)
FOUR = replace(PAIR, volunteers=4, microbatches=3)
TRIO = replace(PAIR, volunteers=3, layouts=ONE_STAGE, seats=(), microbatches=3, steps=1)


def quiet(_swarm: CheckedSwarm) -> None:
    """Nothing happens besides."""


def at(moment: str, times: int, act: Callable[[CheckedSwarm], None], later_s: float = 0.0) -> Twist:
    """`act` `later_s` seconds after `moment` has come for the n-th time (`SimSwarm.hooks` says which moments
    there are).
    """

    def arrange(swarm: CheckedSwarm) -> None:
        left = times

        def hook(what: str) -> None:
            nonlocal left
            left -= what == moment
            if what == moment and left == 0:
                swarm.world.after(later_s, lambda: act(swarm))

        swarm.hooks.append(hook)

    return arrange


def kill(name: str) -> Callable[[CheckedSwarm], None]:
    """`name` dies, for good."""
    return lambda swarm: swarm.volunteers[name].kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A history: `first` and `last` are words of the first and the last line that is shown; empty: of all."""

    title: str
    look_for: str
    config: HistoryConfig = PAIR
    twist: Twist = quiet
    late: Mapping[str, float] = field(default_factory=dict)
    first: str = ""
    last: str = ""
    seed: int = 1
    clusters: bool = False
    without: tuple[str, ...] = ()
    """Lines with one of these words are left out."""

    def told(self) -> str:
        """The transcript."""
        swarm, scribe = written(self.config, self.seed, self.late, clusters=self.clusters)
        self.twist(swarm)
        swarm.run(LIMIT_S)
        lines = [line for line in scribe.compact() if not any(word in line for word in self.without)]
        begin = next(n for n, line in enumerate(lines) if self.first in line)
        end = next(n for n, line in enumerate(lines) if n > begin and self.last in line) if self.last else -1
        shown = [*lines[begin:end], lines[end]]
        body = [*([OMITTED] if begin else []), *shown, *([OMITTED] if lines[end] is not lines[-1] else [])]
        return "\n".join([self.title, "", textwrap.fill(self.look_for, WIDTH), "", *body, ""])


HANDING_ROUND = ("its part of", "its parameters of", "adds up", "sum of block", "applies the update")
"""Words of lines that every reduce and every update has."""
AFTERWARDS = ("copies version", "save:", "ends the run", "finished:")
COMPUTING = ("computes", "activation of", "gradient of", "settled:")

STORIES: Mapping[str, Story] = {
    "01_quiet_step": Story(
        title="A quiet step",
        look_for=(
            "Two volunteers, each alone at its place, train one step of two microbatches. Look for the "
            "order: hello and claim, forward and backward, seal, plan, vote, commit, update, and at the "
            "end a checkpoint. A reduce has nothing to exchange here; votes name the bits of a sum by a "
            "letter."
        ),
        config=replace(PAIR, steps=1),
    ),
    "02_death_in_the_forward": Story(
        title="A death in the forward pass",
        look_for=(
            "v3 dies while it computes microbatch 1. v2 still has the activation that it sent. Look for "
            "the lease: once the coordinator says that v3 is gone, v2 sends the same activation to v1, "
            "and each id counts once in the plan."
        ),
        config=FOUR,
        twist=at("record commit", 1, kill("v3"), 0.33),
        first="begin: step 1",
        last="commit: step 1",
        without=("applies the update", "applied: step 0"),
    ),
    "03_death_in_the_reduce": Story(
        title="A death in the reduce",
        look_for=(
            "v3 dies when all sums are made and only its vote is missing. v2 sees the link break and "
            "sends its activation to v1 at once, but that result does not count while v3's does. Look for "
            "plan 2: v1 has computed microbatch 1 again, and the holders of the other blocks vote once "
            "more, on the same bits."
        ),
        config=FOUR,
        twist=at("tell vote", 5, kill("v3")),
        first="plan: 1 of step 1",
        last="commit: step 1",
    ),
    "04_late_joiner": Story(
        title="A late joiner who shares a step",
        look_for=(
            "v2 comes while step 0 begins. Look for its place beside v0, its state from v0, and the "
            "moment it enters the running step: microbatches that v0 has not begun are handed out anew, "
            "and the plan adds sums of both."
        ),
        config=replace(PAIR, volunteers=3, microbatches=6, slot_capacity=3),
        late={"v2": 1.1},
        first="v2           starts",
        last="writes to the log: commit step 0",
        without=("settled:",),
    ),
    "05_coordinator_failover": Story(
        title="A coordinator failover",
        look_for=(
            "The coordinator dies just after it has written commit 0. Look for the new term: volunteers "
            "come back with their places and version 1, so nothing is fetched; step 1 begins anew, as "
            "sums of an older term count nowhere."
        ),
        twist=at("record commit", 1, lambda swarm: swarm.crash_coordinator(2.0)),
        first="writes to the log: commit step 0",
        last="writes to the log: commit step 1",
    ),
    "06_leftover": Story(
        title="A leftover that a newcomer finishes",
        look_for=(
            "v1 dies as the only holder of blocks 2-3. v0 keeps its activations: leftovers, work without "
            "a holder. Look for v2, which takes the place, loads version 0 and enters the running step; "
            "no microbatch is computed again at v0."
        ),
        config=replace(PAIR, volunteers=3, steps=1, microbatches=4, seats=((0, 0), (0, 2), (1, 2))),
        late={"v2": 3.0},
        twist=at("tell ready", 2, kill("v1"), 0.5),
        first="begin: step 0",
        last="writes to the log: commit step 0",
    ),
    "07_spot_check": Story(
        title="A liar caught by a spot check",
        look_for=(
            "Three volunteers hold all blocks; each contribution is checked. v2 sends false sums, the "
            "same to everybody. Look for the check of microbatch 2: one computes it once more and finds "
            "something else, another one decides between them. v2 is banned before anything of it is "
            "committed."
        ),
        config=replace(TRIO, check_share=1.0, lies={"v2": "sends"}),
        first="begin: step 0",
        last="writes to the log: commit step 0",
        without=(*HANDING_ROUND, "settled:", "proved:", "prove:"),
    ),
    "08_sum_proof": Story(
        title="A sum proof that fails",
        look_for=(
            "v2 adds up something else than it has received, and gives everybody the same. All votes "
            "agree. Look for the proof after the vote: fingerprints of parts and sums do not match, a "
            "second plan has other reducers, and the testimonies show that v2 contradicts the others."
        ),
        config=replace(TRIO, check_share=1e-9, lies={"v2": "adds"}),
        first="plan: 1 of step 0",
        last="writes to the log: commit step 0",
        without=("computes", "settled:", "sum of block", "applies"),
    ),
    "09_frozen_volunteer": Story(
        title="A frozen volunteer that comes back",
        look_for=(
            "v3 stands still for 12 seconds, longer than its lease. Look for what it says when it goes "
            "on: its session is over, so it begins another one, and goes on from the state that it holds."
        ),
        config=replace(FOUR, steps=6),
        twist=at("tell sealed", 5, lambda swarm: swarm.volunteers["v3"].freeze(12.0)),
        first="v3           freezes",
        last="v3           to coordinator: ready",
        without=(*COMPUTING, *HANDING_ROUND, "sealed:"),
    ),
    "10_roll_back": Story(
        title="A roll-back when the last holder dies",
        look_for=(
            "v1 alone has version 1 of blocks 2-3 when it dies, and no checkpoint has it. The coordinator "
            "waits ten seconds for it to come back. Look for the roll-back to version 0: v0 gives up a state "
            "that was right, loads the older one, and step 0 is trained again with v2."
        ),
        config=replace(PAIR, volunteers=3),
        twist=at("record commit", 1, kill("v1"), 0.5),
        late={"v2": 8.0},
        first="writes to the log: commit step 0",
        last="writes to the log: commit step 0",
    ),
    "11_duplicate_report": Story(
        title="A duplicate report",
        look_for=(
            "v3's worker hangs for six seconds. The coordinator hands its microbatch out anew, to v0 and "
            "v1. Look for the late report of v3: its slot does not count, as the ids in it are counted "
            "already, and the plan has each id once."
        ),
        config=replace(FOUR, stall_s=1.0),
        twist=at("record commit", 1, lambda swarm: swarm.volunteers["v3"].worker.hang(6.0), 0.3),
        first="begin: step 1",
        last="commit: step 1",
        without=("applies the update", "applied: step 0"),
    ),
    "12_move": Story(
        title="A move to another place",
        look_for=(
            "A planner asks that v2 goes from blocks 0-1 to blocks 2-3. Look for the order: v2 finishes "
            "step 1 at its old place, a checkpoint is made, v2 loads other graphs and its new blocks from "
            "v1 while step 2 runs, and counts microbatches of step 3 there."
        ),
        seed=2,
        config=replace(PAIR, volunteers=3, steps=4, microbatches=4),
        twist=at("record commit", 1, lambda swarm: swarm.arrange(MOVE)),
        first="begin: step 1",
        last="writes to the log: commit step 3",
        without=(*COMPUTING, *HANDING_ROUND),
    ),
    "13_clusters": Story(
        title="Two clusters that average",
        look_for=(
            "Each volunteer is a cluster of its own, which trains batches of its own. Look for the "
            "averaging: v1 waits for company while v0 trains a second batch, both add up parameters of "
            "version 2 of v0 and version 1 of v1, and both install the mean as their next version."
        ),
        config=replace(PAIR, layouts=ONE_STAGE, seats=(), steps=4),
        clusters=True,
        first="founded cluster 0",
        last="begin: step 3",
        without=("settled:", "computes"),
    ),
    "14_overlapping_steps": Story(
        title="Overlapping steps",
        look_for=(
            "Staleness 1: a step may begin before the one before it is committed, with parameters one "
            "version older. Look for step 1, which begins together with step 0, and for work of step 1 "
            "between the plan and the commit of step 0."
        ),
        config=replace(PAIR, staleness=1, steps=3, evaluate_every=100),
        first="begin: step 0",
        last="writes to the log: commit step 1",
        without=("settled:",),
    ),
    "15_checkpoint": Story(
        title="A checkpoint sealed",
        look_for=(
            "A checkpoint is due after step 0. Look for the two tracks: volunteers copy version 1 and go "
            "on with step 1 at once, while the coordinator fetches the copies; the log names the "
            "checkpoint only when it is complete."
        ),
        config=replace(PAIR, checkpoint_every=1),
        first="writes to the log: commit step 0",
        last="checkpoint version 1 is complete",
    ),
}
