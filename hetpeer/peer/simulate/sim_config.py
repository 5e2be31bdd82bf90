"""The shape of a simulated run, and what its coordinator and volunteers are told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hetpeer.averaging.effects import EVERY_ID
from hetpeer.averaging.member.step_vote import ModelShape
from hetpeer.averaging.reduce.holder_reduce import LENGTH
from hetpeer.averaging.reduce.tied_parameters import Tie, Ties
from hetpeer.bootstrap.conduct.check_rules import CheckRules
from hetpeer.bootstrap.state.effects import CoordinatorConfig
from hetpeer.bootstrap.state.membership import BlockDemand
from hetpeer.peer.simulate.network.wires import Ground
from hetpeer.peer.simulate.sim_numerics import Numerics
from hetpeer.stages.block.fingerprint import KEY_BYTES, distance
from hetpeer.stages.planning.swarms.plan_inputs import Compression


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    """The defaults are a swarm of four, in two cuts of four blocks."""

    volunteers: int = 4
    layouts: tuple[tuple[tuple[int, int], ...], ...] = (((0, 2), (2, 4)), ((0, 1), (1, 4)))
    steps: int = 8
    microbatches: int = 6
    evaluation_microbatches: int = 2
    evaluate_every: int = 2
    slot_capacity: int = 2
    ties: tuple[Tie, ...] = ()
    checkpoint_every: int = 3
    staleness: int = 0
    """Steps that begin before the one that they follow is committed."""
    fresh_steps: int = 0
    """But none of the first so many."""
    head_start: int = EVERY_ID
    """Microbatches of such a step that may be computed before."""
    clip_norm: float | None = None
    latency_s: tuple[float, float] = (0.005, 0.12)
    stall_s: float = 8.0
    reduce_s: float = 6.0
    sync_s: float = 10.0
    speeds: tuple[float, ...] = (1.0, 0.5, 2.0, 1.0, 0.7, 1.5)
    """Of the volunteers, in turn; at 1 a worker takes as long as sim_worker.py says."""
    fetch_s: tuple[float, float] = (0.05, 0.3)
    """How long the transfer of one block's state takes."""
    uplinks: tuple[float, ...] = (0.0,)
    """What the volunteers say of theirs, in turn; 0: nothing. Only the shares of a reduce depend on it."""
    shard_length: int = LENGTH
    """Numbers that a shard has, as far as its share is cut."""
    part_s: tuple[float, float] = (0.0, 0.0)
    """How much later a part of an averaging leaves: lines are slow, and models large."""
    credit: int = 0
    """Bundles of each kind that a volunteer takes from another at a time; 0: any number."""
    duplicates: float = 0.05
    """Share of tensors that arrive twice."""
    ground: Ground | None = None
    """What blocks and lines cost; None: everything takes a moment."""
    seats: tuple[tuple[int, int], ...] = ()
    """(cluster, first block) of the place that each volunteer takes if it is open; none: they choose."""
    check_share: float = 0.0
    """Of contributions that are computed once more by another."""
    lies: Mapping[str, str] = field(default_factory=dict)
    """Volunteer → what is false of it, several joined by "+". Sums: that it "sends", or "pads" where it adds them up itself, or "exaggerates", that it computes for a "check", or that it has "received". Bundles: "outputs", "gradients",
    what it "lends" for a check, what it "answers" to a checker, what it "accuses" others by as a checker. Words: it "slanders" who has given it something, or
    "excuses" itself with digests of something else. Or it "refuses" to check, "hides" what it has received, is "mute" about bundles, "evades"
    the question what it has computed from. In a reduce: it "tears" what it adds up, others get something else than itself, "spoils" it, so that it is no number, or "withholds"
    it; "objects" to others' parts; it "keeps" its own, or "abstains" from voting; "votes" falsely, "denies" what it was given, too, or "inflates" the norm once it is known what is usual. In a proof: as reducer it "adds" something else than it has received, and "covers" that by what it says of its share, it "frames" others by what it says of its parts,
    or "disowns" what it got; as a witness, or in question, it "perjures" itself. Of its state: it "alters" it, and says so before others do, or "flips" a bit of one once; or it "saves" another one in checkpoints.
    It "dawdles": it never has the state that it is to fetch; or it "wavers": whenever it has said that it is ready it takes that back.
    It "fails" whatever it is given, and says so of the rest, too, or "blames" the first two volunteers for it.
    """
    arranged_s: float = 0.0
    """Another division of the blocks is proposed so often; 0: never."""

    def told_by(self, volunteer: str) -> frozenset[str]:
        """Its lies."""
        return frozenset(self.lies.get(volunteer, "").split("+"))

    def member(self, numerics: Numerics) -> ModelShape:
        """What a volunteer must know of the model."""
        ties = Ties(self.ties)
        return ModelShape(numerics.sizes, self.slot_capacity, ties, self.head_start, self.shard_length)

    def coordinator(self, numerics: Numerics, draw: Callable[[], float]) -> CoordinatorConfig:
        """What the manifest would say. `draw` decides who is checked."""
        blocks, ties = range(numerics.blocks), Ties(self.ties)
        compression = Compression() if self.ground is None else self.ground.work.compression
        return CoordinatorConfig(
            run="sim",
            steps=self.steps,
            sizes=[1] * self.microbatches,
            evaluation_microbatches=self.evaluation_microbatches,
            evaluate_every=self.evaluate_every,
            checkpoint_every=self.checkpoint_every,
            clip_norm=self.clip_norm,
            layouts=self.layouts,
            asks=None if self.ground is None else self.ground.work,
            link_ratio=compression.forward,
            compression=compression,
            costs=[
                BlockDemand(elements=numerics.sizes[block], memory_bytes=1, flops=1.0) for block in blocks
            ],
            ties={block: ties.partners(block) for block in blocks},
            stall_s=self.stall_s,
            reduce_s=self.reduce_s,
            sync_s=self.sync_s,
            staleness=self.staleness,
            fresh_steps=self.fresh_steps,
            checks=CheckRules(
                share=self.check_share,
                tolerance=1e-9,
                draw=draw,
                key=lambda: int(draw() * 2**64).to_bytes(KEY_BYTES, "little"),
                distance=distance,
            )
            if self.check_share
            else None,
        )
