"""Last part of the demo: check the run and write the results into OUT.

The audit counts every microbatch in the volunteers' signed logs; the replay computes the run again on one
machine, to the last bit. The plot has both curves. Results are summary.json, loss.svg, weights.safetensors,
weights.metrics.jsonl and sample.txt.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hetpeer.bootstrap.audit.audit import AuditVerdict, audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.audit.replay_result import Replay
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.results.export import export
from hetpeer.bootstrap.results.generate import generate
from hetpeer.bootstrap.run.durable_files import atomic_write
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.demo.demo_run import Kill, LogFeed, Trained
from hetpeer.peer.demo.demo_settings import DemoSettings
from hetpeer.peer.demo.demo_view import DemoView
from hetpeer.peer.limits.amounts import counted
from hetpeer.peer.watching.loss_plot import PlotMark, loss_curve
from hetpeer.stages.data.shards import TOKENS

PROMPT_BYTES, SAMPLE_BYTES = 32, 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """summary.json. Losses in nats per token, paths relative to OUT."""

    ok: bool
    problems: Sequence[str]
    steps: int
    first_loss: float
    last_loss: float
    eval_loss: float
    """Held-out, after the last step."""
    tokens_per_second: float
    """Mean from the first commit to the last, all interruptions included."""
    peers: int
    killed: int
    rollbacks: int
    microbatches_expected: int
    microbatches_counted: int
    microbatches_lost: int
    microbatches_duplicated: int
    equal_steps: int
    """Steps that one machine computes again with equal bits."""
    near_steps: int
    """Steps that are as near as rounding allows, on another kind of processor."""
    recovery_seconds: float | None
    """Longest recovery from a kill (`log_feed.recovery_seconds`); None without one before the run ended."""
    checkpoint: str
    export: str
    plot: str
    sample: str

    def lines(self, out: Path) -> Iterator[str]:
        """Lines for people."""
        yield f"steps         {self.steps} committed, {counted(self.rollbacks, 'roll-back')}"
        ends = f"{self.first_loss:.4f} at the start, {self.last_loss:.4f} at the end"
        yield f"loss          {ends}, {self.eval_loss:.4f} on held-out text"
        yield f"speed         {self.tokens_per_second:,.0f} tokens/s by {self.peers} volunteers"
        healed = "" if self.recovery_seconds is None else f", recovered after {self.recovery_seconds:.1f} s"
        yield f"killed        {counted(self.killed, 'volunteer')}{healed}"
        counts = f"{self.microbatches_counted} of {self.microbatches_expected} counted exactly once"
        wrong = f"{self.microbatches_lost} lost, {self.microbatches_duplicated} duplicated"
        yield f"microbatches  {counts}, {wrong}"
        near = f", {self.near_steps} as near as rounding allows" if self.near_steps else ""
        yield f"one machine   {self.equal_steps} of {self.steps} steps equal to the last bit{near}"
        yield f"files         {out / self.plot}  {out / self.export}  {out / self.sample}"
        yield from (f"problem       {problem}" for problem in self.problems)
        yield f"verdict       {'exactly once' if self.ok else 'BROKEN'}"


def report(settings: DemoSettings, run: RunDirectory, trained: Trained, view: DemoView) -> Summary:
    """Check the run, write everything into OUT. Raises `LocalError` HP-AUDIT-001, HP-DISK-*, HP-CKPT-001."""
    collect_evidence(run, map(settings.home, range(1, settings.peers + 1)))
    view.say("counting every microbatch in the volunteers' signed logs")
    verdict = audit(run.path)
    view.say("computing the same run again on one machine, to compare")
    replayed = replay(run.path)
    exported = export(run.path, settings.out / "weights.safetensors")
    sample = settings.out / "sample.txt"
    atomic_write(sample, _sample(settings, run))
    plot = settings.out / "loss.svg"
    atomic_write(plot, _plot(settings, trained, replayed).encode())
    files = {"checkpoint": run.checkpoints, "export": exported.weights, "plot": plot, "sample": sample}
    paths = {name: str(path.relative_to(settings.out)) for name, path in files.items()}
    summary = summarise(settings, trained, verdict, replayed, paths)
    document = {"schema": "hetpeer.demo/1", **asdict(summary)}
    atomic_write(settings.out / "summary.json", json.dumps(document, indent=1).encode() + b"\n")
    return summary


def collect_evidence(run: RunDirectory, homes: Iterable[Path]) -> None:
    """Put the logs in the volunteers' home folders in place of what the coordinator received of them.

    They say at least as much: a volunteer that was killed may have signed more than it could still send.
    """
    for home in homes:
        events = home / "runs" / run.run_id / "events.jsonl"
        if events.exists():
            peer_id = Identity.load(home / "identity.key").peer_id
            shutil.copyfile(events, run.volunteers / f"{peer_id}.jsonl")


def summarise(
    settings: DemoSettings,
    trained: Trained,
    verdict: AuditVerdict,
    replayed: Replay,
    paths: Mapping[str, str],
) -> Summary:
    """The figures. `paths` has checkpoint, export, plot and sample."""
    history = trained.feed.history
    problems = [*verdict.problems, *replayed.problems, *_missing(settings, history)]
    recoveries = [kill.recovery_seconds for kill in trained.kills if kill.recovery_seconds is not None]
    return Summary(
        ok=verdict.ok and replayed.ok and not problems,
        problems=problems,
        steps=history.version,
        first_loss=float(history.commits[0]["loss"]),
        last_loss=float(history.commits[history.version - 1]["loss"]),
        eval_loss=history.evaluations[max(history.evaluations)],
        tokens_per_second=_speed(trained.feed, settings.tokens_per_step),
        peers=settings.peers,
        killed=len(trained.kills),
        rollbacks=history.rollbacks,
        microbatches_expected=verdict.microbatches_expected,
        microbatches_counted=verdict.counted,
        microbatches_lost=verdict.lost,
        microbatches_duplicated=verdict.duplicated,
        equal_steps=replayed.equal,
        near_steps=replayed.near,
        recovery_seconds=max(recoveries, default=None),
        **paths,
    )


def _missing(settings: DemoSettings, history: History) -> Iterator[str]:
    if history.version < settings.steps:
        yield f"only {history.version} of {settings.steps} steps were committed"
    if history.checkpoint_version != history.version:
        yield f"the last checkpoint is of step {history.checkpoint_version}"


def _speed(feed: LogFeed, tokens_per_step: int) -> float:
    """Tokens a second over the committed steps, without the first step, in which volunteers still join."""
    at = [seen.at for seen in feed.seen if seen.record["kind"] == "commit"]
    if at[-1] == at[0]:
        return tokens_per_step / feed.step_seconds()
    return tokens_per_step * (feed.history.version - 1) / (at[-1] - at[0])


def _sample(settings: DemoSettings, run: RunDirectory) -> bytes:
    """The beginning of the held-out text, gone on with by the trained model."""
    batches = run.batches()
    first, *_ = batches.microbatch(0, batches.plan.evaluation.start)[TOKENS]
    prompt = bytes(first[:PROMPT_BYTES].astype("uint8")).decode(errors="replace")
    pieces = generate(run.path, prompt, tokens=SAMPLE_BYTES, temperature=0.8, seed=settings.seed)
    return prompt.encode() + b"".join(pieces) + b"\n"


def _plot(settings: DemoSettings, trained: Trained, replayed: Replay) -> str:
    history = trained.feed.history
    return loss_curve(
        [(step, float(commit["loss"])) for step, commit in sorted(history.commits.items())],
        evaluations=sorted(history.evaluations.items()),
        reference=sorted(replayed.losses.items()),
        marks=[*_kill_marks(trained.kills), *_rollback_marks(trained.feed)],
        title=f"{settings.steps} steps by {settings.peers} volunteers, "
        f"{len(trained.kills)} killed on the way",
    )


def _kill_marks(kills: Sequence[Kill]) -> Iterator[PlotMark]:
    for kill in kills:
        yield PlotMark(step=kill.step, text=f"{kill.name} killed")


def _rollback_marks(feed: LogFeed) -> Iterator[PlotMark]:
    for seen in feed.seen:
        if seen.record["kind"] == "rollback":
            yield PlotMark(step=seen.record["to_version"], text="rolled back to here", rollback=True)
