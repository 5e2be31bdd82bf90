"""Rules that choose how far links shrink, on lines of 2 to 5 Mbit/s up, in virtual time.

Four stages of a GPT of 11 million parameters train with the product's schedule on workers and uplinks in
virtual time (stages/planning). Each rule gives every link an encoding; a step then takes so long, and the
model needs so many more tokens for the same loss (stages/links/token_prices.py). Their product is the time to
a loss. Lines are measured as the product measures them, so ours is the coordinator's own `RatioChoice` and
each volunteer's own `LinkBook`, step after step. Nothing here depends on how busy the machine is.

    python -m benchmarks.link_rules
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import report
from hetpeer.bootstrap.run.settings import LinkSettings
from hetpeer.bootstrap.state.link_targets import RatioChoice
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.peer.transport.link_book import LinkBook
from hetpeer.peer.transport.uplink import ARRIVALS, KNOWN, SEVERAL, WINDOW_S
from hetpeer.stages.links.adaptive_ratio import coding_for, ratio_of
from hetpeer.stages.links.codec import Codec
from hetpeer.stages.links.token_prices import log_price
from hetpeer.stages.pipeline.routes import Hop
from hetpeer.stages.planning.step_estimate import estimate
from hetpeer.stages.planning.swarms.plan_inputs import Compression
from hetpeer.stages.planning.uplinks import PeerLink
from hetpeer.stages.planning.virtual_swarm import VirtualVolunteer

MBIT = 1e6 / 8
MICROBATCHES, TOKENS, WIDTH = 32, 1024, 384
BUNDLE = 4.0 * TOKENS * WIDTH
"""Bytes of a microbatch at a border."""
WORK_S, VARIES, DELAY_S = 0.5, 0.2, 0.02
"""Seconds of a microbatch at each stage, forward and backward; and how much they vary."""
LINES = {
    "5 Mbit/s": (5.0, 5.0, 5.0, 5.0),
    "2 to 5 Mbit/s": (5.0, 2.0, 3.0, 4.0),
    "one of 2, others 100": (100.0, 2.0, 100.0, 100.0),
    "20 Mbit/s": (20.0, 20.0, 20.0, 20.0),
    "1 Gbit/s": (1000.0, 1000.0, 1000.0, 1000.0),
}
"""Uplinks of the four stages."""
MOST = 100.0
ROUNDS = 6
"""Steps in which a rule that adapts settles."""
LIMIT = Codec.of("topk-int4")

Ratios = dict[tuple[str, str], float]
"""(from, to) → times fewer bytes."""


@dataclass(frozen=True, slots=True)
class Swarm:
    """One pipeline; stage n is volunteer str(n)."""

    uplinks: tuple[float, ...]
    """Mbit/s."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        stages = range(len(self.uplinks))
        return [(str(a), str(b)) for a in stages for b in stages if abs(a - b) == 1]

    def alone_s(self, sender: str) -> float:
        """Seconds of an uncompressed bundle that has the uplink to itself."""
        return BUNDLE / (self.uplinks[int(sender)] * MBIT)

    def step_s(self, ratios: Mapping[tuple[str, str], float]) -> float:
        machines = {
            str(stage): VirtualVolunteer(
                forward_s=WORK_S / 3, backward_s=2 * WORK_S / 3, varies=VARIES, uplink=rate * MBIT
            )
            for stage, rate in enumerate(self.uplinks)
        }
        links = {
            (sender, to): PeerLink(
                rate=self.uplinks[int(sender)] * MBIT,
                delay_s=DELAY_S,
                activation_bytes=BUNDLE / ratios[sender, to],
                gradient_bytes=BUNDLE / ratios[sender, to],
            )
            for sender, to in self.pairs
        }
        route = tuple(Hop(str(stage), stage, stage + 1) for stage in range(len(self.uplinks)))
        return estimate(machines, links, dict.fromkeys(range(MICROBATCHES), route)).seconds


def reached(ratio: float) -> float:
    """Times fewer bytes of the encoding that is chosen for `ratio`."""
    coding = coding_for(LIMIT, ratio)
    return 4.0 / coding.codec.cost(coding.share)


def uniform(ratio: float) -> Callable[[Swarm], Ratios]:
    return lambda swarm: dict.fromkeys(swarm.pairs, reached(ratio))


def eq_7(swarm: Swarm) -> Ratios:
    """FusionLLM's: in proportion to the link's time, the slowest by the author's ratio."""
    longest = max(swarm.alone_s(sender) for sender, _ in swarm.pairs)
    return {pair: reached(max(1.0, MOST * swarm.alone_s(pair[0]) / longest)) for pair in swarm.pairs}


def until_computing(swarm: Swarm) -> Ratios:
    """Until each link by itself keeps up with the computation, whatever that costs: the rule of before."""
    found = {}
    for pair in swarm.pairs:
        seconds = swarm.alone_s(pair[0])
        needed, rounded = (ratio_of(seconds, goal, MOST) for goal in (WORK_S, WORK_S / 2))
        coding = coding_for(LIMIT, needed, rounded=rounded)
        found[pair] = 4.0 / coding.codec.cost(coding.share)
    return found


def ours(swarm: Swarm) -> Ratios:
    """The coordinator's choice and the volunteers' books, a few steps long."""
    books = {str(n): LinkBook(LinkSettings(codec=str(LIMIT), ratio=MOST)) for n in range(len(swarm.uplinks))}
    choice, found = RatioChoice(), Ratios()
    compression = Compression(forward=MOST, backward=MOST, adaptive=True)
    for _ in range(ROUNDS):
        for sender, to in swarm.pairs:
            book = books[sender]
            book.measured(to, swarm.uplinks[int(sender)] * MBIT, 2 * DELAY_S)
            coding = book.coding(to, round(BUNDLE), 4.0, gradient=int(to) < int(sender))
            found[sender, to] = 4.0 / coding.codec.cost(coding.share)
        ready = []
        for peer, book in books.items():
            _fill(book, swarm.uplinks[int(peer)] * MBIT)
            for what in ("forward", "backward"):
                book.computed(what, WORK_S / 2)
            paced = book.paced()
            one = VolunteerState(peer, 1, 0.0, place=(int(peer), int(peer) + 1), computing=paced.computing)
            one.links = dict(paced.links)
            ready.append(one)
        targets = choice.targets(ready, MOST, compression)
        for peer, book in books.items():
            book.target = targets.get(peer, 0.0)
    return found


def _fill(book: LinkBook, rate: float) -> None:
    """Both links of a stage in the middle are busy together for some seconds."""
    if len(book.links) < SEVERAL:
        return
    for arrival in range(KNOWN * ARRIVALS + 1):
        now = arrival * WINDOW_S / ARRIVALS
        book.outflow.look(now, SEVERAL, round(rate * now), round(BUNDLE), DELAY_S)


RULES: Mapping[str, Callable[[Swarm], Ratios]] = {
    "none": lambda swarm: dict.fromkeys(swarm.pairs, 1.0),
    "int8 everywhere": uniform(3.9),
    "uniform Top-K, 100": uniform(MOST),
    "FusionLLM's Eq. 7, 100": eq_7,
    "until computing": until_computing,
    "ours": ours,
}


def figures_of(name: str, rule: Callable[[Swarm], Ratios]) -> dict[str, Any]:
    swarm = Swarm(LINES[name])
    ratios = rule(swarm)
    price = math.exp(sum(0.5 * log_price(ratio) for ratio in ratios.values()))
    seconds = swarm.step_s(ratios)
    return {
        "step_s": seconds,
        "tokens_per_second": MICROBATCHES * TOKENS / seconds,
        "price": price,
        "useful_tokens_per_second": MICROBATCHES * TOKENS / seconds / price,
        "ratios": {f"{sender} → {to}": round(ratio, 2) for (sender, to), ratio in ratios.items()},
    }


def show(figures: dict[str, Any]) -> None:
    for line, rules in figures["lines"].items():
        print(line)
        for rule, row in rules.items():
            print(
                f"  {rule:24} {row['step_s']:8.1f} s a step  {row['tokens_per_second']:8.0f} tok/s  "
                f"x {row['price']:5.2f} tokens = {row['useful_tokens_per_second']:8.0f} useful tok/s  "
                f"ratios {min(row['ratios'].values()):.1f} to {max(row['ratios'].values()):.1f}"
            )
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    options = parser.parse_args()
    lines = {name: {rule: figures_of(name, made) for rule, made in RULES.items()} for name in LINES}
    goals = {
        f"{name}: no rule makes more useful tokens a second than ours, by more than 3 %": max(
            row["useful_tokens_per_second"] for row in rules.values()
        )
        <= 1.03 * rules["ours"]["useful_tokens_per_second"]
        for name, rules in lines.items()
    }
    figures = {"lines": lines, "goals": goals, "met": all(goals.values())}
    return report.finish("link-rules", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
