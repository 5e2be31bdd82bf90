"""Configuration of a history: that of a simulated swarm, with spot checks, lies and a planner that
interferes.

Lies about sums: a volunteer "sends" a false one, "pads" it where it adds it up itself, "exaggerates" it; it
computes falsely for a "check", or misreports what it has "received".

Lies about bundles: "outputs", "gradients", what it "lends" for a check, what it "answers" to a checker, what
it "accuses" others by as a checker. It "slanders" whoever has given it something, or "excuses" itself with
digests of something else. It "refuses" to check, "hides" what it has received, is "mute" about bundles, or
"evades" the question what it has computed from.

Lies in a reduce: it "tears" what it adds up (others get something else than itself), "spoils" it (it is no
number), or "withholds" it. It "objects" to others' parts, "keeps" its own, or "abstains" from voting. It
"votes" falsely, "denies" what it was given, too, or "inflates" the norm once it is known what is usual.

Lies in a sum proof: as reducer it "adds" something else than it has received, and "covers" that by what it
says of its share. It "frames" others by what it says of its parts, or "disowns" what it got. As a witness, or
in question, it "perjures" itself.

Lies about states: it "alters" one and says so before others do, "flips" a bit of one once, or "saves" another
one in checkpoints.

Other misconduct: it "dawdles" (it never has the state that it is to fetch), "wavers" (it takes back that it
is ready), "fails" whatever it is given, or "blames" the first two volunteers for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from hetpeer.averaging.member.step_vote import ModelShape
from hetpeer.averaging.reduce.tied_parameters import Tie, Ties
from hetpeer.bootstrap.conduct.reputation import CheckRules
from hetpeer.bootstrap.state.effects import CoordinatorConfig
from hetpeer.peer.simulate.sim_config import SwarmConfig
from hetpeer.peer.simulate.sim_numerics import Symbols
from hetpeer.stages.block.fingerprint import KEY_BYTES, distance


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig(SwarmConfig):
    """The defaults are a swarm of four honest volunteers, in two cuts of four blocks."""

    ties: tuple[Tie, ...] = ()
    check_share: float = 0.0
    """Share of contributions that another volunteer computes once more."""
    lies: Mapping[str, str] = field(default_factory=dict)
    """Volunteer → its lies, several joined by "+"."""
    arranged_s: float = 0.0
    """Seconds between proposals of another division of the blocks; 0: never."""
    granted_frames: int = 0
    """Bundles of each kind that a volunteer grants another one at a time; 0: any number."""

    def member(self, numerics: Symbols) -> ModelShape:
        return replace(SwarmConfig.member(self, numerics), ties=Ties(self.ties))

    def coordinator(self, numerics: Symbols) -> CoordinatorConfig:
        ties = Ties(self.ties)
        partners = {block: ties.partners(block) for block in range(numerics.blocks)}
        return replace(SwarmConfig.coordinator(self, numerics), ties=partners)

    def told_by(self, volunteer: str) -> frozenset[str]:
        """Lies of `volunteer`."""
        return frozenset(self.lies.get(volunteer, "").split("+"))

    def check_rules(self, draw: Callable[[], float]) -> CheckRules | None:
        """Rules of spot checks; None if there are none. `draw` decides who is checked."""
        if not self.check_share:
            return None
        return CheckRules(
            share=self.check_share,
            tolerance=1e-9,
            draw=draw,
            key=lambda: int(draw() * 2**64).to_bytes(KEY_BYTES, "little"),
            distance=distance,
        )
