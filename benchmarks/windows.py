"""Wait windows of clusters that average, by the time to a loss, in virtual time and in one process.

The setting of `benchmarks.time_to_loss`: four clusters, a small GPT with batches so noisy that a cluster
alone does not get to the loss that all-reduce has after four fifths of the batches, and stragglers as in
hete-B (in one batch of ten of each cluster its worker sleeps for one and a half batches). The group scheduler
and its windows are the product's; a batch and an averaging take the seconds that they took there, a few
hundredths more or less. All ways train the same batches. So neither losses nor seconds depend on how busy
this machine is. `--iteration` and `--averaging` change the pace.

Two ways are what the product does not do, for comparison: delayed averagings that are as rare as others, and
windows of a twentieth of all the time since a cluster averaged last, not of one batch.

Each seed has its own target: what all-reduce has after four fifths of the batches, the middle of three
evaluations. Evaluations are of the cluster that has the batch.

    python -m benchmarks.windows
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from benchmarks import report
from benchmarks.sparse import text
from benchmarks.stragglers import ONE_OF
from benchmarks.swarm import NEVER
from benchmarks.time_to_loss import ALL, MODEL, NONE, SHARE, TRAINING, late, reached
from hetpeer.averaging.groups.group_scheduler import Group, GroupPipelines
from hetpeer.averaging.groups.wait_window import FREE, WAITED, Adaptive, WaitWindow
from hetpeer.bootstrap.run.settings import AveragingSettings
from hetpeer.bootstrap.service.core_interface import window_of
from hetpeer.examples.gpt import GPT
from hetpeer.stages.planning.uplinks import Timeline

CLUSTERS = 4
ITERATION_S, AVERAGING_S = 0.95, 0.56
"""Seconds of a batch and of an averaging, as `benchmarks.time_to_loss` measured them."""
NAP = 1.5
"""Batches that a straggler sleeps."""
VARIES = 0.03
"""Standard deviation of a batch's seconds, as a share."""
BATCH, HELD_OUT, EVERY = TRAINING.batch_size, 256, TRAINING.eval_every
"""Samples of a batch and of an evaluation; batches between two."""


class Thrifty(Adaptive):
    """A window that ends after a twentieth of the time since the worker averaged with others."""

    def __init__(self, span: int) -> None:
        super().__init__(span, most=FREE)
        self._now = 0.0
        self._met: dict[str, float] = {}

    def arrived(self, worker: str, now: float) -> None:
        self._now = now
        self._met.setdefault(worker, now)
        super().arrived(worker, now)

    def formed(self, group: Collection[str], present: int, now: float) -> None:
        super().formed(group, present, now)
        if len(group) > 1:
            self._met |= dict.fromkeys(group, now)

    def seconds(self, worker: str, present: int) -> float:
        return min(super().seconds(worker, present), WAITED * (self._now - self._met.get(worker, self._now)))


@dataclass(frozen=True, slots=True)
class Way:
    """How clusters average."""

    averaging: AveragingSettings
    window: Callable[[int], WaitWindow] | None = None
    """Span → the window; None: the product's."""


DELAYED = AveragingSettings(delayed=True)
WAYS: Mapping[str, Way] = {
    ALL: Way(AveragingSettings(span=1, window_s="all")),
    NONE: Way(AveragingSettings(span=NEVER, window_s=0.0)),
    "grouped": Way(AveragingSettings()),
    "grouped, delayed": Way(DELAYED),
    "delayed, as rarely as without": Way(DELAYED, Adaptive),
    "grouped, a twentieth of all time": Way(AveragingSettings(), Thrifty),
    "every fourth, of all": Way(AveragingSettings(interval=4, window_s="all")),
    "every fourth, of all, delayed": Way(AveragingSettings(interval=4, window_s="all", delayed=True)),
}


class Data:
    """Text, of which nine tenths are trained, and batches by number."""

    def __init__(self, seed: int) -> None:
        self._text, self._seed = text(), seed
        self._border = len(self._text) * 9 // 10
        draw = torch.Generator().manual_seed(seed)
        self.held_out = self._samples(self._border, len(self._text), HELD_OUT, draw)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Batch `number`: samples, and what follows each byte."""
        draw = torch.Generator().manual_seed(1_000_003 * (self._seed + 1) + number)
        return self._samples(0, self._border, BATCH, draw)

    def _samples(self, begin: int, end: int, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        length = MODEL.sequence_length
        starts = torch.randint(begin, end - length - 1, (count,), generator=draw)
        drawn = torch.stack([self._text[at : at + length + 1] for at in starts.tolist()])
        return drawn[:, :-1], drawn[:, 1:]


@dataclass
class Cluster:
    """A cluster's model and optimizer, and where it stands."""

    name: str
    model: GPT | None
    """None: only its pace is of interest."""
    random: random.Random
    trained: int = 0
    """Batches."""
    since: int = 0
    """Batches since its last group."""
    awake_at: float = 0.0
    """End of its worker's nap."""
    copy: Tensor | None = None
    """The parameters that are averaged, if they are."""
    mean: Tensor | None = None
    """Decided, and not installed."""

    def __post_init__(self) -> None:
        self._weights = [] if self.model is None else list(self.model.parameters())
        if self.model is not None:
            rate, decay = TRAINING.learning_rate, TRAINING.weight_decay
            self._optimizer = torch.optim.AdamW(self._weights, lr=rate, weight_decay=decay)

    def parameters(self) -> Tensor:
        return parameters_to_vector(self._weights).detach().clone() if self._weights else torch.zeros(0)

    def takes(self, parameters: Tensor) -> None:
        if self._weights:
            vector_to_parameters(parameters, self._weights)

    def install(self) -> None:
        """Go from p to p + (m - s)."""
        assert self.mean is not None
        assert self.copy is not None
        self.takes(self.parameters() + (self.mean - self.copy))
        self.copy = self.mean = None

    def train(self, data: Data, number: int) -> None:
        if self.model is not None:
            self._optimizer.zero_grad()
            self.model(*data.batch(number)).backward()
            clip_grad_norm_(self._weights, TRAINING.clip_norm or math.inf)
            self._optimizer.step()

    def loss(self, data: Data) -> float:
        if self.model is None:
            return math.nan
        with torch.no_grad():
            return float(self.model(*data.held_out))


class VirtualRun:
    """One run in virtual time."""

    def __init__(
        self,
        way: Way,
        seed: int,
        iteration_s: float = ITERATION_S,
        averaging_s: float = AVERAGING_S,
        *,
        learns: bool = True,
    ) -> None:
        self._averaging, self._iteration_s, self._averaging_s = way.averaging, iteration_s, averaging_s
        self._data = Data(seed)
        self._timeline = Timeline()
        names = [str(number) for number in range(CLUSTERS)]
        span = way.averaging.span
        window = window_of(way.averaging, trains_on=False) if way.window is None else way.window(span)
        self._scheduler = GroupPipelines(1, names, span, window)
        self.clusters = {}
        for name in names:
            torch.manual_seed(seed)  # all begin alike
            sizes = MODEL.width, MODEL.layers, MODEL.heads, MODEL.sequence_length, 256
            model = GPT(*sizes) if learns else None
            self.clusters[name] = Cluster(name, model, random.Random(f"{seed} {name}"))
        self._seed = seed
        self._handed = 0
        self.committed = 0
        self.evaluations: list[tuple[float, float]] = []
        self.groups: Counter[int] = Counter()
        self.waited_s = 0.0
        self._waits: dict[str, float] = {}

    def result(self) -> dict[str, Any]:
        """Run to the end."""
        for cluster in self.clusters.values():
            self._begin(cluster)
        self._timeline.run(lambda: self.committed == TRAINING.steps)
        seconds = self._timeline.now
        mean = torch.stack([one.parameters() for one in self.clusters.values()]).mean(0)
        first = self.clusters["0"]
        first.takes(mean)
        self.evaluations.append((seconds + self._averaging_s, first.loss(self._data)))
        return {
            "batches_per_s": TRAINING.steps / seconds,
            "loss": self.evaluations[-1][1],
            "evaluations": self.evaluations,
            "groups": dict(sorted(self.groups.items())),
            "waited": self.waited_s / (CLUSTERS * seconds),
        }

    def _begin(self, cluster: Cluster) -> None:
        """Begin the next batch, if there is one."""
        if self._handed == TRAINING.steps:
            self._tell(self._scheduler.left(cluster.name, self._timeline.now))
            return
        number, now = self._handed, self._timeline.now
        self._handed += 1
        if number % EVERY == 0:
            self.evaluations.append((now, cluster.loss(self._data)))
        seconds = self._iteration_s * cluster.random.gauss(1.0, VARIES)
        asleep = max(0.0, cluster.awake_at - now)
        self._timeline.after(asleep + seconds, lambda: self._trained(cluster, number))

    def _trained(self, cluster: Cluster, number: int) -> None:
        cluster.train(self._data, number)
        self.committed += 1
        turn, position = divmod(cluster.trained, ONE_OF)
        if position == random.Random(f"{self._seed} {cluster.name} {turn}").randrange(ONE_OF):
            cluster.awake_at = self._timeline.now + NAP * self._iteration_s
        cluster.trained += 1
        cluster.since += 1
        self._at_barrier(cluster)

    def _at_barrier(self, cluster: Cluster) -> None:
        """Install a mean, then line up or go on."""
        now = self._timeline.now
        if cluster.mean is not None:
            cluster.install()
        if cluster.since < self._averaging.interval:
            self._begin(cluster)
        elif cluster.copy is not None:
            self._waits.setdefault(cluster.name, now)  # for its mean
        else:
            self._waits[cluster.name] = now
            self._tell(self._scheduler.ready(0, cluster.name, now))

    def _tell(self, groups: Iterable[Group]) -> None:
        now = self._timeline.now
        for group in groups:
            members = [self.clusters[name] for name in group.members]
            for one in members:
                one.since = 0
                self.waited_s += now - self._waits.pop(one.name)
            self.groups[len(members)] += 1
            if len(members) > 1:
                self._average(members)
            if self._averaging.delayed or len(members) == 1:
                for one in members:
                    self._begin(one)
        wait = self._scheduler.due_at - now
        if 0 < wait < math.inf:
            self._timeline.after(wait, lambda: self._tell(self._scheduler.tick(self._timeline.now)))

    def _average(self, members: list[Cluster]) -> None:
        now = self._timeline.now
        for one in members:
            one.copy = one.parameters()
        awake = max(0.0, *(one.awake_at - now for one in members))
        takes = awake + self._averaging_s * random.Random(f"{self._seed} {now}").gauss(1.0, VARIES)
        self._timeline.after(takes, lambda: self._decided(members, takes))

    def _decided(self, members: list[Cluster], seconds: float) -> None:
        self._scheduler.averaged(seconds)
        mean = torch.stack([one.copy for one in members if one.copy is not None]).mean(0)
        for one in members:
            one.mean = mean
            if not self._averaging.delayed:
                one.install()
                self._begin(one)
            elif one.name in self._waits:
                self.waited_s += self._timeline.now - self._waits.pop(one.name)
                self._at_barrier(one)


def measure(options: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    for seed in range(options.seed, options.seed + options.seeds):
        for way, runs in found.items():
            run = VirtualRun(WAYS[way], seed, options.iteration, options.averaging)
            runs.append(run.result())
    targets = [late(run) for run in found[ALL]]
    usual = [reached(run["evaluations"], target) for run, target in zip(found[ALL], targets, strict=True)]
    rows = {}
    for way, runs in found.items():
        times = [reached(run["evaluations"], target) for run, target in zip(runs, targets, strict=True)]
        shares = [mine / theirs for mine, theirs in zip(times, usual, strict=True) if mine and theirs]
        rows[way] = {
            "batches_per_s": statistics.mean(run["batches_per_s"] for run in runs),
            "loss": statistics.mean(run["loss"] for run in runs),
            "waited": statistics.mean(run["waited"] for run in runs),
            "groups": dict(sorted(sum((Counter(run["groups"]) for run in runs), Counter()).items())),
            "reached_s": times,
            "of_all_reduce": statistics.median(shares) if shares else None,
            "never": sum(one is None for one in times),
        }
    goals = {"the target is out of reach without synchronisation": rows[NONE]["never"] == options.seeds}
    if (delayed := rows.get("grouped, delayed")) is not None:
        share, never = delayed["of_all_reduce"], delayed["never"]
        goals[f"delayed groups are there in {SHARE:g} of the time of all-reduce, with every seed"] = (
            not never and share is not None and share <= SHARE
        )
    return {"targets": targets, "ways": rows, "runs": found, "goals": goals, "met": all(goals.values())}


def show(figures: dict[str, Any]) -> None:
    alone = figures["ways"].get(NONE, {}).get("batches_per_s", math.nan)
    for way, one in figures["ways"].items():
        share = "never" if one["of_all_reduce"] is None else f"{one['of_all_reduce']:.2f}"
        rate = one["batches_per_s"]
        print(
            f"{way:32} {rate:5.2f} ({rate / alone:.2f})  loss {one['loss']:.4f}  waited {one['waited']:.3f}"
            f"  {share} (never: {one['never']})  groups {one['groups']}"
        )
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--iteration", type=float, default=ITERATION_S)
    parser.add_argument("--averaging", type=float, default=AVERAGING_S)
    options = parser.parse_args()
    options.ways = list(dict.fromkeys([ALL, NONE, *options.ways]))
    return report.finish("windows", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
