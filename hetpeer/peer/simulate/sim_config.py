"""Configuration of a simulated swarm, as its coordinator and its volunteers get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetpeer.averaging.member.step_vote import ModelShape
from hetpeer.averaging.reduce.reduce_shards import LENGTH
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.bootstrap.state.effects import CoordinatorConfig
from hetpeer.bootstrap.state.membership import BlockDemand
from hetpeer.peer.simulate.network.sim_uplinks import SimHardware
from hetpeer.peer.simulate.sim_numerics import Symbols
from hetpeer.stages.pipeline.delays import EVERY_ID, Delays
from hetpeer.stages.pipeline.place_memory import PlaceDemand
from hetpeer.stages.planning.swarms.plan_inputs import Compression


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    """Shape of a run and of its volunteers. The defaults are a swarm of four, in two cuts of four blocks."""

    volunteers: int = 4
    layouts: tuple[tuple[tuple[int, int], ...], ...] = (((0, 2), (2, 4)), ((0, 1), (1, 4)))
    steps: int = 8
    microbatches: int = 6
    evaluation_microbatches: int = 2
    evaluate_every: int = 2
    slot_capacity: int = 2
    checkpoint_every: int = 3
    staleness: int = 0
    """Number of steps that may begin before an earlier one is committed."""
    fresh_steps: int = 0
    """Number of steps at the beginning that do not overlap."""
    head_start: int = EVERY_ID
    """Number of microbatches of an overlapping step that are computed with older parameters."""
    stage_staleness: tuple[tuple[int, int], ...] = ()
    """(first block, most versions behind) of each stage of overlapping steps; empty: all are equally old."""
    bad: Mapping[tuple[int | None, int], int] = field(default_factory=dict)
    """(batch, id) of microbatches that nobody can compute → block whose forward fails, or -1 - block for its
    backward; held-out ids have no batch.
    """
    skips: bool = False
    """Whether such microbatches are left out; otherwise they halt the run."""
    clip_norm: float | None = None
    latency_s: tuple[float, float] = (0.005, 0.12)
    stall_s: float = 8.0
    reduce_s: float = 6.0
    sync_s: float = 10.0
    speeds: tuple[float, ...] = (1.0, 0.5, 2.0, 1.0, 0.7, 1.5)
    """Speeds of the volunteers, in turn: FLOP/s with `hardware`, else 1 is a worker as in sim_worker.py."""
    fetch_s: tuple[float, float] = (0.05, 0.3)
    """Least and most seconds that the transfer of one block's state takes."""
    uplinks: tuple[float, ...] = (0.0,)
    """Bytes/s that the volunteers state, in turn; 0: nothing stated.

    Only the shares of a reduce depend on it.
    """
    shard_length: int = LENGTH
    """Elements of a shard, at least."""
    sparse: bool = False
    """Whether clusters average movements, all of them each time."""
    part_s: tuple[float, float] = (0.0, 0.0)
    """Least and most seconds by which a part of an averaging leaves late."""
    duplicates: float = 0.05
    """Share of tensors that arrive twice."""
    hardware: SimHardware | None = None
    """Cost of blocks and links; None: work and messages take short random times."""
    seats: tuple[tuple[int, int], ...] = ()
    """(cluster, first block) of the place that each volunteer takes if it is open; beyond these they choose.
    """

    def member(self, numerics: Symbols) -> ModelShape:
        """Model, as a volunteer needs to know it."""
        return ModelShape(
            numerics.sizes, self.slot_capacity, Ties(()), self.delays, self.shard_length, self.sparse
        )

    @property
    def delays(self) -> Delays:
        """Versions that the microbatches of steps that overlap are computed with."""
        return Delays(self.head_start, self.stage_staleness)

    def fails_at(self, batch: int, number: int) -> int | None:
        """The entry of `bad` for microbatch `number` of `batch`, if there is one."""
        return self.bad.get((batch if number < self.microbatches else None, number))

    def coordinator(self, numerics: Symbols) -> CoordinatorConfig:
        """Settings of the coordinator, as a manifest would give them."""
        blocks = range(numerics.blocks)
        compression = Compression() if self.hardware is None else self.hardware.work.compression
        return CoordinatorConfig(
            run="sim",
            steps=self.steps,
            sizes=[1] * self.microbatches,
            evaluation_microbatches=self.evaluation_microbatches,
            evaluate_every=self.evaluate_every,
            checkpoint_every=self.checkpoint_every,
            clip_norm=self.clip_norm,
            layouts=self.layouts,
            asks=None if self.hardware is None else self.hardware.work,
            link_ratio=compression.forward,
            compression=compression,
            costs=[
                BlockDemand(elements=numerics.sizes[block], memory=PlaceDemand(activations=1), flops=1.0)
                for block in blocks
            ],
            stall_s=self.stall_s,
            reduce_s=self.reduce_s,
            sync_s=self.sync_s,
            skips=self.skips,
            staleness=self.staleness,
            fresh_steps=self.fresh_steps,
            averaging_sparse=self.sparse,
        )
