"""How a run trains: the author's settings, as the manifest has them."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data.sample_order import size_of

Count = Annotated[int, Field(ge=0, lt=2**60)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
Factor = Annotated[float, Field(ge=0, le=1000)]
Setting = bool | int | float | str | tuple[float, ...] | tuple[tuple[float, float], ...]
"""One setting of an update rule, as the compute worker is told it (stages/block/parameter_groups.py)."""


class ManifestPart(BaseModel):
    """A part of the manifest. Unknown fields are ignored, so that later versions may add some."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ParameterGroup(ManifestPart):
    """Parameters whose name matches `pattern` (as the shell has them) and what differs for them; None: as the others."""

    pattern: Annotated[str, Field(min_length=1, max_length=200)]
    learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    weight_decay: Annotated[float, Field(ge=0, le=1)] | None = None

    @property
    def changes(self) -> dict[str, Setting]:
        """The settings that differ."""
        return self.model_dump(exclude_none=True, exclude={"pattern"})


def parameter_group(text: str) -> dict[str, str | float]:
    """The fields of a `ParameterGroup` as people write them: `PATTERN:KEY=VALUE,KEY=VALUE`. Raises `LocalError` HP-RUN-001."""
    pattern, _, changes = text.rpartition(":")
    fields: dict[str, str | float] = {"pattern": pattern}
    for change in changes.split(","):
        key, _, value = change.partition("=")
        try:
            fields[key] = float(value)
        except ValueError:
            key = ""
        if key not in ("learning_rate", "weight_decay") or not pattern:
            raise LocalError(
                "HP-RUN-001",
                f"the parameter group {text!r} cannot be read",
                why="it is not a pattern, a colon, and settings with a number each",
                fix="write it as '*.bias:weight_decay=0' or '*norm*:learning_rate=1e-4,weight_decay=0'",
                exit_code=ExitCode.CONFIG,
            )
    return fields


class AdmissionSettings(ManifestPart):
    """Who may take part (docs/admission.md)."""

    policy: Literal["open", "invited", "listed"] = "open"
    work_bits: Annotated[int, Field(ge=0, le=32)] = 0
    """A new identity costs 2**`work_bits` hashes."""
    per_network: Count = 0
    """Volunteers of one network at a time; 0: any number."""


class TrustSettings(ManifestPart):
    """How numbers of volunteers are checked (docs/trust.md)."""

    spot_checks: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of contributions that another volunteer computes once more."""


CodecName = Literal["none", "bf16", "fp16", "int8", "int4", "topk-bf16", "topk-int8", "topk-int4"]
DenseCodecName = Literal["none", "bf16", "fp16", "int8", "int4"]


class LinkSettings(ManifestPart):
    """How tensors travel between volunteers (docs/links.md)."""

    codec: CodecName = "none"
    """The strongest way in which a link may write activations."""
    backward: CodecName | None = None
    """The same of gradients; None: as activations."""
    ratio: Annotated[float, Field(ge=1, le=1000)] = 100.0
    """How many times fewer bytes a link may send at most."""
    adaptive: bool = True
    """Whether only slow links shrink what they send, and only as far as it helps; else all do, by `ratio`."""
    feedback: bool = False
    """Whether what is left out of a gradient is added to the next one over the same border, or of the same block."""
    reduce: DenseCodecName = "none"
    """How gradients and parameters are written that are added up or averaged (docs/averaging.md)."""

    @property
    def lossy(self) -> bool:
        return self.codec != "none" or self.backward not in (None, "none") or self.reduce != "none"


class Outer(ManifestPart):
    """An outer optimizer: Nesterov's momentum over what averagings move (DiLoCo; averaging/optim/outer_optimizer.py)."""

    learning_rate: Annotated[float, Field(gt=0, le=2)] = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    @property
    def keeps(self) -> tuple[str, ...]:
        return "outer_anchor", "outer_momentum"


class AveragingSettings(ManifestPart):
    """Mode `grouped`: clusters train batches of their own and average with those that are ready (docs/averaging.md)."""

    span: Positive = 10
    """Any so many groups for each cluster, in a row, connect all of them."""
    interval: Positive = 1
    """Batches that a cluster trains before it averages."""
    delayed: bool = False
    """Whether it trains the next ones while the last are averaged."""
    corrected: bool = False
    """Whether Adam's second moments are taken for those of the group's mean gradient (SDPipe, section 4)."""
    window_s: Annotated[float, Field(ge=0)] | Literal["adaptive", "all"] = "adaptive"
    """How long the first that is ready waits for others; `all`: for all of them, `adaptive`: as it turns out to be worth."""
    outer: Outer | None = None
    """None: a cluster goes on from the mean."""
    robust: bool = False
    """Whether what is far from the others' parameters is clipped: so a few clusters cannot move the mean far."""


class AdamW(ManifestPart):
    """Loshchilov & Hutter (2019), as torch has it."""

    name: Literal["AdamW"] = "AdamW"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8

    @property
    def keeps(self) -> tuple[str, ...]:
        """What is kept of each parameter between updates, by torch's names."""
        return "exp_avg", "exp_avg_sq"


class NAdam(ManifestPart):
    """Dozat (2016), as torch has it, with AdamW's weight decay: Nesterov's look-ahead makes up for gradients that are some updates old
    (Ajanthan et al., ICML 2025).
    """

    name: Literal["NAdam"]
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    decoupled_weight_decay: Literal[True] = True

    @property
    def keeps(self) -> tuple[str, ...]:
        """As AdamW."""
        return "exp_avg", "exp_avg_sq"


class SGD(ManifestPart):
    """Stochastic gradient descent, as torch has it."""

    name: Literal["SGD"] = "SGD"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()


class TrainingSettings(ManifestPart):
    """How the run trains. A step updates the parameters once, by `batch_size` samples."""

    steps: Positive = 60
    batch_size: Positive = 128
    microbatch_size: Positive = 8
    """Samples that are computed at once; the last microbatch of a step has what is left."""
    eval_every: Positive = 10
    """Steps between evaluations; one more comes after the last step."""
    eval_microbatches: Positive = 4
    checkpoint_every: Positive = 10
    slot_size: Positive = 4
    """Microbatches a slot may hold: a lost volunteer costs at most so many of each block."""
    optimizer: Annotated[AdamW | NAdam | SGD, Field(discriminator="name")] = AdamW()
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 5e-4
    schedule: Annotated[tuple[tuple[Count, Factor], ...], Field(min_length=1, max_length=10_000)] = (
        (1, 1.0),
    )
    """(step from 1, by what it multiplies the learning rate), straight in between (averaging/optim/learning_rate.py)."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.1
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest 2-norm of the whole model's gradient; None does not clip."""

    dtype: Literal["float32", "bf16"] = "float32"
    """What workers compute in; parameters, gradients and moments are float32 anyway."""
    recompute: bool = False
    """Whether blocks run forward twice instead of keeping activations."""
    staleness: Annotated[int, Field(ge=0, le=8)] = 0
    """So many steps begin before the one that they follow is committed: their gradients are of parameters so many updates old
    (docs/asynchronous.md).
    """
    fresh_steps: Count = 0
    """The first so many steps (of a grouped run: batches) do not overlap with the one that they follow."""
    head_start: Positive | None = None
    """So many microbatches of such a step are computed with the older parameters; the others wait for the newest. None: all of them are."""
    compensation: Annotated[float, Field(ge=0, le=100)] = 0.0
    """λ by which such a gradient is changed for what has been applied meanwhile (DC-ASGD)."""

    groups: tuple[ParameterGroup, ...] = ()
    """The first that matches a parameter's name decides."""

    @property
    def update(self) -> dict[str, Setting]:
        """What averaging/optim/update_rules.py makes a rule of."""
        common = {name: getattr(self, name) for name in ("learning_rate", "weight_decay", "schedule")}
        return self.optimizer.model_dump() | common

    @property
    def microbatches(self) -> int:
        """M: microbatches of one step."""
        return -(-self.batch_size // self.microbatch_size)

    @property
    def ids(self) -> int:
        """Microbatches of a step, the held-out ones included: their ids are smaller."""
        return self.microbatches + self.eval_microbatches

    def most_behind(self, step: int, batch: int) -> int:
        """By how many updates the parameters with which step `step` computes `batch` may be older than its own."""
        return 0 if batch < self.fresh_steps else min(self.staleness, step)

    def samples_of(self, number: int) -> int:
        """Samples of microbatch `number`; ids from M on are held-out ones, which are full."""
        return size_of(number, self.batch_size, self.microbatch_size)

    @model_validator(mode="after")
    def _sizes_fit(self) -> TrainingSettings:
        if self.microbatch_size > self.batch_size:
            raise ValueError(
                f"training.microbatch_size {self.microbatch_size} is above training.batch_size {self.batch_size}"
            )
        if any(step >= later for (step, _), (later, _) in pairwise(self.schedule)):
            raise ValueError("the steps of training.schedule do not rise")
        if self.fresh_steps and not self.staleness:
            raise ValueError(
                f"training.fresh_steps {self.fresh_steps} is of steps that overlap later (training.staleness)"
            )
        if self.fresh_steps >= self.steps:
            raise ValueError(
                f"training.fresh_steps {self.fresh_steps} (by default those of the warm-up) leaves none of {self.steps} steps to overlap"
            )
        if self.head_start is not None and not (self.staleness and self.head_start <= self.microbatches):
            raise ValueError(
                f"training.head_start {self.head_start} is not of {self.microbatches} microbatches of steps that overlap (training.staleness)"
            )
        if self.head_start is not None and self.compensation:
            raise ValueError(
                "training.compensation is for steps whose microbatches are all as old, and training.head_start for others"
            )
        if self.slot_size > self.microbatches:
            raise ValueError(
                f"training.slot_size {self.slot_size} is above the {self.microbatches} microbatches of a step"
            )
        return self
