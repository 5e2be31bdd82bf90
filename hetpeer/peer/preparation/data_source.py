"""The author's inputs at a volunteer: shards of data, fetched when a microbatch needs them, or before.

The data order says what later steps need, and a volunteer most likely gets the same ids in the next step:
their shards come in the background, so normally no microbatch waits for its data.

`DataGate` stands between the network and the member core: it holds back tasks until their microbatch's data
is here. To the core a task whose data is still on its way is like any late message. So nothing in the core
knows of data, and every command that it asks for can be posted at once and in order. Other tasks go on
meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import StepId
from hetpeer.averaging.member.tensor_heads import ActivationHead
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.peer.preparation.state_fetcher import RunFiles
from hetpeer.stages.data.shards import Arrays, ShardFile
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.pipeline.routes import Hop

FEW_SHARDS = 2
"""A step whose samples lie in so few shards needs all of them wherever its microbatches are computed."""
AHEAD_STEPS, AHEAD_BYTES = 64, 64 * 2**20
"""Steps and bytes fetched ahead, nearest shards first; a quarter of the disk limit is a limit, too."""
TRIES, RETRY_S = 5, 2.0
"""A shard that nobody has is asked for again; then its microbatches count as failed here."""

_log = logging.getLogger(__name__)


class DataSource:
    """Microbatches for the blocks `specs`, which read some of the author's inputs.

    Shards are fetched in `tasks`.

    Raises `LocalError` HP-RUN-007 if a block wants inputs that the run's samples do not have.
    """

    def __init__(self, files: RunFiles, specs: Sequence[BlockSpec], tasks: TaskSet) -> None:
        manifest = files.run.manifest
        self._files = files
        self._tasks = tasks
        self._batches = files.run.batches()
        self._plan = self._batches.plan
        self._steps = manifest.training.steps
        self._ids = self._plan.evaluation.stop
        """Ids of a step's microbatches, the held-out ones included, are below this."""
        self._references = {shard.name: shard for shard in (*manifest.data.train, *manifest.data.heldout)}
        self._blocks = tuple(spec.index for spec in specs if spec.data)
        self._here: set[str] = set()
        """Shards that lie on the disk, whole."""
        self._coming: dict[str, asyncio.Task[None]] = {}
        self._ahead: asyncio.Task[None] | None = None
        self._soon: Sequence[ShardFile] = ()
        """Shards that the next steps need, as far as the background looks ahead."""
        self._ids_here: dict[int, set[int]] = {}
        """Step → the ids that came here, for the last two steps."""
        self._full: LocalError | None = None
        """A shard found no room. That matters once a microbatch needs one."""
        for spec in specs:
            self._check(spec)
        files.room.reader = self

    # ── what is asked of it ─────────────────────────────────────────────────────────────────────────────────

    def concerns(self, step: int, number: int, begin: int, end: int) -> bool:
        """Whether the blocks [begin, end) here read anything of microbatch `number` of `step`."""
        known = 0 <= step <= self._steps and 0 <= number < self._ids
        return known and any(begin <= block < end for block in self._blocks)

    def is_ready(self, step: int, number: int) -> bool:
        """Whether all shards of a microbatch are here."""
        return self._here.issuperset(shard.name for shard in self._plan.shards(step, number))

    async def make_ready(self, step: int, number: int) -> None:
        """Return when a microbatch's shards are here, or after several tries in which no peer gave one of
        them.

        Raises `LocalError` HP-DISK-005 if a shard finds no room.
        """
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(RETRY_S)
            self._full = None
            await self._bring(self._plan.shards(step, number))
            if self._full is not None and await self._want_less(step):
                self._full = None
                await self._bring(self._plan.shards(step, number))
            if self.is_ready(step, number):
                return
            if self._full is not None:
                raise self._full

    def microbatch(self, step: int, number: int) -> Arrays:
        """Every array of the samples, each [samples of the microbatch, …], held-out microbatches from M on.

        Raises `LocalError` HP-DATA-006 if a shard is not here.
        """
        try:
            return self._batches.microbatch(step, number)
        except LocalError as error:
            names = [shard.name for shard in self._plan.shards(step, number)]
            self._here.difference_update(names)
            raise LocalError(
                "HP-DATA-006",
                f"the data of microbatch {number} of step {step} is not here",
                why=f"nobody gave us one of {', '.join(names)}",
                fix="ask the run's author whether the bootstrap node runs",
                exit_code=ExitCode.NETWORK,
            ) from error

    # ── looking ahead ───────────────────────────────────────────────────────────────────────────────────────

    def note_id(self, step: int, number: int) -> None:
        """Note that microbatch `number` of `step` came here: in the next step it most likely does again."""
        self._ids_here.setdefault(step, set()).add(number)

    def begun(self, step: int) -> None:
        """A step begins: fetch in the background what the next ones need."""
        self._ids_here = {number: ids for number, ids in self._ids_here.items() if abs(number - step) <= 1}
        ids = sorted(set().union(*self._ids_here.values()))
        if self._ahead is not None:
            self._ahead.cancel()
        self._soon = self._next(step, ids)
        self._ahead = self._tasks.spawn(self._look_ahead(self._soon), name="data of the next steps")

    async def warm_up(self, step: int) -> None:
        """Fetch, before the first step, shards that `step` needs wherever its microbatches are computed."""
        self._soon = [*self._needed(step, ()), *self._held_out()]
        await self._bring(self._soon)

    def close(self) -> None:
        """Fetch nothing more."""
        for task in (*self._coming.values(), self._ahead):
            if task is not None:
                task.cancel()
        if self._files.room.reader is self:
            self._files.room.reader = None

    def wanted(self) -> frozenset[str]:
        """Names of shards that must not be removed: being fetched, or needed by ids here or by next steps."""
        named = (
            shard
            for step, numbers in self._ids_here.items()
            for number in numbers
            for shard in self._plan.shards(step, number)
        )
        return frozenset(shard.name for shard in (*named, *self._soon, *self._held_out())) | set(self._coming)

    async def _want_less(self, step: int) -> bool:
        """Want only what ids of this step need, for lack of room; False if nothing else was wanted or coming.

        A shard that is still coming holds room, and can be spared only once it is here.
        """
        before, coming = self.wanted(), [*self._coming.values()]
        if self._ahead is not None:
            self._ahead.cancel()
        if coming:
            await asyncio.wait(coming)
        self._soon, self._ids_here = (), {step: self._ids_here.get(step, set())}
        return bool(coming) or self.wanted() != before

    def forget(self, shards: Sequence[str]) -> None:
        """Note that the files of `shards` are removed: they must be fetched again."""
        self._here.difference_update(shards)
        self._batches.forget()

    async def _look_ahead(self, soon: Iterable[ShardFile]) -> None:
        for shard in soon:
            await self._bring([shard])

    def _next(self, step: int, ids: Sequence[int]) -> list[ShardFile]:
        """The shards that the steps after `step` need, the nearest first."""
        found: dict[ShardFile, None] = {}
        room = min(AHEAD_BYTES, self._files.room.limit() / 4)  # what is needed at once is to find some
        for later in range(step + 1, step + 1 + AHEAD_STEPS):
            for shard in self._needed(later, ids):
                if shard not in found:
                    room -= shard.bytes
                    if room < 0:
                        return list(found)
                    found[shard] = None
        return list(found)

    def _held_out(self) -> frozenset[ShardFile]:
        """Shards that every evaluation needs, wherever its microbatches are computed."""
        shards = {shard for number in self._plan.evaluation for shard in self._plan.shards(0, number)}
        return frozenset(shards if len(shards) <= FEW_SHARDS else ())

    def _needed(self, step: int, ids: Iterable[int]) -> Iterator[ShardFile]:
        """The shards of a step that we are likely to need."""
        shards = self._plan.shards_of_step(step) if step < self._steps else []
        if len(shards) <= FEW_SHARDS:
            yield from shards
            return
        for number in ids:
            if number < self._plan.microbatches:
                yield from self._plan.shards(step, number)

    # ── fetching ────────────────────────────────────────────────────────────────────────────────────────────

    async def _bring(self, shards: Iterable[ShardFile]) -> None:
        """Have the shards fetched that are not here; what nobody has stays away."""
        missing = [shard for shard in dict.fromkeys(shards) if shard.name not in self._here]
        if missing:
            await asyncio.wait([self._arrival(shard) for shard in missing])

    def _arrival(self, shard: ShardFile) -> asyncio.Task[None]:
        """Task that fetches `shard`, shared by all that wait for it; it goes on if those give up."""
        if shard.name not in self._coming:
            task = self._tasks.spawn(self._fetch(shard), name=f"data shard {shard.name}")
            self._coming[shard.name] = task
            task.add_done_callback(lambda _: self._coming.pop(shard.name))
        return self._coming[shard.name]

    async def _fetch(self, shard: ShardFile) -> None:
        """Fetch a shard unless it is here; a full disk is noted and not raised."""
        try:
            await asyncio.to_thread(self._batches.open, shard)
        except LocalError:
            _log.info("fetching data shard %s", shard.name)
            try:
                await self._files.fetch_shard(self._references[shard.name])
            except LocalError as error:
                if error.code != "HP-DISK-005":
                    raise
                self._full = error
                return
            await asyncio.to_thread(self._batches.open, shard)
        self._here.add(shard.name)

    def _check(self, spec: BlockSpec) -> None:
        """Refuse a block whose inputs are not in the run's samples. Raises `LocalError` HP-RUN-007."""
        for name, tensor in spec.data.items():
            array = self._plan.sample.get(name)
            if array is None or (array.dtype, array.shape) != (tensor.dtype, tensor.shape[1:]):
                raise LocalError(
                    "HP-RUN-007",
                    f"block {spec.index} wants an input {name!r} that the run's samples do not have",
                    why="the run's graph and its data were not made together",
                    fix="ask the run's author to make the run again",
                    exit_code=ExitCode.VERSION,
                )


class DataGate:
    """The gate of one place, before the blocks that `source` serves; without one everything passes."""

    def __init__(self, source: DataSource | None, tasks: TaskSet) -> None:
        self._source = source
        self._tasks = tasks
        self._held: dict[asyncio.Task[None], StepId] = {}
        self._begun: dict[StepId, int] = {}
        """The last steps that began here, beside one another → the batch that each trains."""

    def message(self, message: m.Begin | m.Reroute, receive: Callable[[m.Message], None]) -> None:
        """Pass `message` to `receive`; tasks that must wait for data follow later, each as a `Reroute`."""
        step = StepId(message.line, message.step)
        if isinstance(message, m.Begin):
            if message.group:
                receive(message)  # nothing is trained in it, and steps go on beside it
                return
            self._begun = {**(self._begun if message.behind else {}), step: message.batch}
            if self._source is not None:
                self._source.begun(message.batch)
        if step not in self._begun:
            receive(message)  # of a step that is past, or has not begun: the core knows what to do
            return
        batch = self._begun[step]
        ready: list[m.Task] = []
        late: list[m.Task] = []
        for task in message.tasks:
            (ready if self._may_pass(batch, task.id, task.route[0]) else late).append(task)
        receive(message.model_copy(update={"tasks": tuple(ready)}))
        for task in late:
            again = m.Reroute(line=message.line, step=message.step, tasks=(task,))
            self._hold(step, batch, task.id, partial(receive, again))

    def activation(self, head: ActivationHead, receive: Callable[[], None]) -> None:
        """Call `receive` for an activation that arrived, at once or when its microbatch's data is here."""
        if self._may_pass(head.batch, head.id, head.route[0]):
            receive()
        else:
            self._hold(head.step_id, head.batch, head.id, receive)

    def end_step(self, step: StepId) -> None:
        """Drop the tasks held for `step`: it is over and its tensors are freed."""
        for task in [task for task, held in self._held.items() if held == step]:
            task.cancel()

    def close(self) -> None:
        """Let nothing through any more, and fetch nothing."""
        if self._source is not None:
            self._source.close()
        for task in list(self._held):
            task.cancel()

    def _may_pass(self, batch: int, number: int, hop: Hop) -> bool:
        source = self._source
        if source is None or not source.concerns(batch, number, hop.begin, hop.end):
            return True
        source.note_id(batch, number)
        return source.is_ready(batch, number)

    def _hold(self, step: StepId, batch: int, number: int, let_go: Callable[[], None]) -> None:
        async def wait() -> None:
            assert self._source is not None
            await self._source.make_ready(batch, number)
            let_go()

        task = self._tasks.spawn(wait(), name=f"data of microbatch {number}")
        self._held[task] = step
        task.add_done_callback(self._held.pop)
