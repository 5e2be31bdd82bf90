"""A run's settings as lines for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hetpeer.peer.limits.amounts import counted

if TYPE_CHECKING:
    from hetpeer.bootstrap.run.manifest import Manifest
    from hetpeer.bootstrap.run.settings import AveragingSettings, LinkSettings, TrainingSettings


def settings_lines(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """(label, text) of the settings of a run."""
    training, data = manifest.training, manifest.data
    steps = counted(training.steps, "step")
    computed = ", activations recomputed" if training.recompute else ""
    sizes = f"{counted(training.batch_size, 'sample')} in microbatches of {training.microbatch_size}"
    yield "training", f"{steps} of {sizes}, in {training.dtype}{computed}"
    yield "rate", _rate(training)
    yield "optimizer", _optimizer(training)
    if training.staleness:
        fresh = f", not in the first {training.fresh_steps}" if training.fresh_steps else ""
        overlap = f"{counted(training.staleness, 'step')} in advance"
        bounds = ", ".join(str(most) for _, most in manifest.delays.stages)
        stages = f"; parameters are at most {bounds} steps old, stage by stage" if bounds else ""
        yield "staleness", f"each step begins {overlap}{fresh}{stages} (docs/asynchronous.md)"
    evaluated = (
        counted(training.eval_microbatches, "microbatch", "microbatches")
        if training.eval_samples is None
        else f"{counted(training.eval_samples, 'held-out sample')}, each once"
    )
    yield "evaluation", f"every {counted(training.eval_every, 'step')}, {evaluated}"
    yield "checkpoint", f"every {counted(training.checkpoint_every, 'step')}"
    trained, held = (sum(shard.samples for shard in shards) for shards in (data.train, data.heldout))
    unit = f" of {data.tokens_per_sample} tokens" if data.kind == "text" else ""
    yield "data", f"{trained:,} samples{unit} to train on, {held:,} held out; seed {manifest.seed}"
    yield "links", _links(manifest.links)
    yield (
        "mode",
        "exact: each update is that of one machine"
        if manifest.averaging is None
        else _grouped(manifest.averaging),
    )
    yield "admission", _admission(manifest)
    checks = manifest.trust.spot_checks
    yield "trust", f"{checks:.0%} of the work is computed a second time" if checks else "no spot checks"
    yield "reliable", counted(len(manifest.coordinators), "reliable peer")


def _rate(training: TrainingSettings) -> str:
    """`0.0005, constant`, or the first, the highest and the last point of its schedule."""
    knots = training.schedule
    if len({factor for _, factor in knots}) == 1:
        return f"{training.learning_rate * knots[0][1]:g}, constant"
    highest = max(knots, key=lambda knot: knot[1])
    shown = dict.fromkeys((knots[0], highest, knots[-1]))
    return ", ".join(f"{training.learning_rate * factor:g} at step {step}" for step, factor in sorted(shown))


def _optimizer(training: TrainingSettings) -> str:
    facts: list[str] = [training.optimizer.name]
    for key, value in training.optimizer.model_dump(
        exclude={"name", "eps", "decoupled_weight_decay"}
    ).items():
        text = " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
        facts.append(f"{key} {text}")
    facts.append(f"weight decay {training.weight_decay:g}")
    clipped = (
        "gradients are not clipped" if training.clip_norm is None else f"clip norm {training.clip_norm:g}"
    )
    facts.append(clipped)
    facts += (
        [f"{counted(len(training.groups), 'parameter group')} of its own settings"] if training.groups else []
    )
    return ", ".join(facts)


def _links(links: LinkSettings) -> str:
    if not links.lossy:
        bits = "tensors are sent bit for bit"
        return f"{bits}; pipelines send the largest of what they have moved" if links.sparse else bits
    where = "slow links only" if links.adaptive else "every link"
    facts = [f"activations {links.codec}, gradients {links.backward or links.codec}"]
    rises = f" after {counted(links.ratio_warmup, 'step')}" if links.ratio_warmup else ""
    facts.append(f"at most {links.ratio:g} times smaller{rises}, on {where}")
    facts.append(f"reduce {links.reduce}")
    return ", ".join(facts)


def _grouped(averaging: AveragingSettings) -> str:
    window = f"{averaging.window_s:g} s" if isinstance(averaging.window_s, float) else averaging.window_s
    every = counted(averaging.interval, "batch", "batches")
    flags = [name for name in ("delayed", "corrected", "robust") if getattr(averaging, name)]
    outer = averaging.outer
    flags += [f"outer nesterov {outer.learning_rate:g}, momentum {outer.momentum:g}"] if outer else []
    facts = [f"pipelines average every {every}", f"window {window}", f"span {averaging.span}", *flags]
    return f"grouped: {', '.join(facts)}"


def _admission(manifest: Manifest) -> str:
    from hetpeer.bootstrap.run.admission_policies import ADMISSION_POLICIES

    admission = manifest.admission
    facts: list[str] = [ADMISSION_POLICIES[admission.policy].describe]
    if admission.work_bits:
        facts.append(f"a new identity costs 2^{admission.work_bits} hashes")
    if admission.per_network:
        facts.append(f"{counted(admission.per_network, 'volunteer')} of one network at most")
    return "; ".join(facts)
