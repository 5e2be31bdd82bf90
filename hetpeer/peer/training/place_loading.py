"""Loading a place: what a volunteer fetches and loads into its workers before it can fetch the state."""

from __future__ import annotations

import logging
from functools import partial

from hetpeer.bootstrap.run.step_workload import demand_of
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.peer.preparation.data_source import DataSource
from hetpeer.peer.preparation.state_fetcher import RunFiles, keep_trying, prepare_block
from hetpeer.peer.training.place_on_devices import HeldBlocks, PlaceOnDevices
from hetpeer.peer.training.volunteer_figures import Offer
from hetpeer.peer.transport.exchange import StateRoomError, reserve_copies
from hetpeer.peer.transport.tensor_schema import bundles_beside
from hetpeer.peer.transport.tensor_store import TensorStore
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.parameter_reads import without_copies
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc.compute import Compute
from hetpeer.stages.pipeline.division import Division
from hetpeer.stages.pipeline.place_memory import Choice, room_text, runs_away
from hetpeer.stages.pipeline.schedule_1f1b import MOST, InFlightWindow, shortest

_log = logging.getLogger(__name__)


class PlaceLoading:
    """A volunteer's loaded place: blocks in its workers, room for microbatches, its part of the data."""

    def __init__(
        self,
        files: RunFiles,
        compute: Compute,
        offer: Offer,
        store: TensorStore,
        window: InFlightWindow,
        tasks: TaskSet,
    ) -> None:
        self._files = files
        self._manifest = files.run.manifest
        self._compute = compute
        self._offer = offer
        self._store = store
        self._window = window
        self._tasks = tasks
        self.offload: Choice | None = None
        """Kind of offload of the place, and its room; None before there is a place."""
        self.state_bytes: dict[int, int] = {}
        """Blocks loaded into the workers, and the bytes that each one's state takes."""
        self.source: DataSource | None = None
        """Its samples, if its blocks read any."""

    async def load(self, begin: int, end: int) -> list[BlockSpec]:
        """Load blocks `begin` to `end` - 1 instead of those before; try on while nobody can give them.

        Returns the blocks as they are held: with recomputation where memory is short.
        """
        await self._unload()
        place, offer = self._place(begin, end), self._offer
        self.offload = choice = place.choice
        division = place.division
        self._compute.divide(division)
        self._tell(begin, end, place)
        scratch = choice.scratch_limit(offer.memory.disk, end - begin)
        await self._compute.submit(c.LimitScratch(nbytes=scratch))
        self._compute.exchange.share.limit = max(offer.memory.disk - scratch, 0)
        specs = [await self._loaded(block, choice) for block in range(begin, end)]
        held = place.held(specs, self._least_in_flight(end, division), offer)
        if again := sum(spec.recompute for spec in held.specs) - sum(spec.recompute for spec in specs):
            _log.info("%d of %d blocks compute their forward twice, to save memory", again, len(specs))
        try:
            reserve_copies(self._compute.exchange, self.state_bytes.values())
        except StateRoomError as error:
            _log.warning("%s; checkpoints may fail without it", error)
        reads = any(spec.data for spec in specs)
        self.source = DataSource(self._files, specs, self._tasks) if reads else None
        self._window.reset(held.most, division.at_work)
        self._store.keep_within(self._for_bundles(held))
        return held.specs

    def close(self) -> None:
        """Let the run's files, which stay, forget the samples."""
        if self.source is not None:
            self.source.close()

    async def _unload(self) -> None:
        while self.state_bytes:
            block, _ = self.state_bytes.popitem()
            await self._compute.submit(c.Unload(block=block))
        await self._compute.submit(c.ForgetResiduals())

    def _place(self, begin: int, end: int) -> PlaceOnDevices:
        entries = self._manifest.blocks[begin:end]
        demands = [demand_of(self._manifest, entry) for entry in entries]
        return PlaceOnDevices.of(begin, demands, [entry.flops_forward for entry in entries], self._offer)

    def _tell(self, begin: int, end: int, place: PlaceOnDevices) -> None:
        choice, division = place.choice, place.division
        _log.info(
            "blocks %d to %d: %s, offload %s%s",
            begin,
            end - 1,
            room_text(choice.room, apart=self._offer.memory.apart),
            choice.kind.value,
            f", on {division.at_work} devices: up to blocks {division.ends}" if division.devices > 1 else "",
        )
        if not place.fits:
            _log.warning("this place is larger than what the devices offer: microbatches may fail here")

    async def _loaded(self, block: int, choice: Choice) -> BlockSpec:
        prepare = partial(
            prepare_block, self._compute, self._files, block, offload=choice.kind, spills=choice.spills
        )
        spec, self.state_bytes[block] = await keep_trying(prepare)
        casts = self._manifest.training.keeps_cast and runs_away(choice.kind, apart=self._offer.memory.apart)
        return without_copies(spec) if casts else spec

    def _least_in_flight(self, end: int, division: Division) -> int:
        """Microbatches under way with which a place up to block `end` holds nobody up (1F1B)."""
        hops = max(sum(begin >= end for begin, _ in layout) for layout in self._manifest.layouts)
        return min(shortest(hops), self._manifest.training.microbatches) + division.at_work - 1

    def _for_bundles(self, held: HeldBlocks) -> int:
        """Bytes of main memory for bundles beside what the workers have of it."""
        apart, most = self._offer.memory.apart, min(held.most, MOST)
        return bundles_beside(self._offer.main.for_model, held.room, held.specs, most, apart=apart)
