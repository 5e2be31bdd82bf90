"""The author's settings in the manifest: training, links, admission, trust, averaging."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from hetpeer.averaging.optim.adam import AdamW
from hetpeer.averaging.optim.update_rules import AnyRule
from hetpeer.bootstrap.run.admission_policies import ADMISSION_POLICIES
from hetpeer.bootstrap.run.owner_signature import Count, ManifestPart, Positive
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data.microbatches import size_of
from hetpeer.stages.links.adaptive_ratio import warmed_up
from hetpeer.stages.links.codec import Codec, codec_names, reduce_codec_names

Factor = Annotated[float, Field(ge=0, le=1000)]
Setting = bool | int | float | str | tuple[float, ...] | tuple[tuple[float, float], ...]
"""One setting of an update rule, as the compute worker gets it (stages/block/parameter_groups.py)."""


class ParameterGroup(ManifestPart):
    """Settings of parameters whose name matches the shell pattern `pattern`; None: the run's setting."""

    pattern: Annotated[str, Field(min_length=1, max_length=200)]
    learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    weight_decay: Annotated[float, Field(ge=0, le=1)] | None = None

    @property
    def changes(self) -> dict[str, Setting]:
        """The settings that differ."""
        return self.model_dump(exclude_none=True, exclude={"pattern"})


def parameter_group(text: str) -> dict[str, str | float]:
    """Fields of a `ParameterGroup` from `PATTERN:KEY=VALUE,KEY=VALUE`. Raises `LocalError` HP-RUN-001."""
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


def _known_policy(name: str) -> str:
    if name not in ADMISSION_POLICIES:
        raise ValueError(f"unknown admission policy {name!r}; known: {', '.join(ADMISSION_POLICIES)}")
    return name


class AdmissionSettings(ManifestPart):
    """Rules of admission to the run (docs/admission.md)."""

    policy: Annotated[str, AfterValidator(_known_policy)] = "open"
    work_bits: Annotated[int, Field(ge=0, le=32)] = 0
    """A new identity needs a proof of work of 2**`work_bits` hashes."""
    per_network: Count = 0
    """Largest number of volunteers from one network at a time; 0: no limit."""


class TrustSettings(ManifestPart):
    """Checks of what volunteers compute (docs/trust.md)."""

    spot_checks: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of contributions that another volunteer computes again, in [0, 1]."""


CHECKED_SHARE: Final = 0.05
"""Share of contributions that is checked in an open run if its author names none."""


def _known_codec(name: str) -> str:
    if name not in (names := codec_names()):
        raise ValueError(f"unknown codec {name!r}; known: {', '.join(names)}")
    return name


def _known_reduce_codec(name: str) -> str:
    if name not in (names := reduce_codec_names()):
        raise ValueError(f"unknown codec {name!r} for a reduce; known: {', '.join(names)}")
    return name


CodecName = Annotated[str, AfterValidator(_known_codec)]
ReduceCodecName = Annotated[str, AfterValidator(_known_reduce_codec)]


class LinkSettings(ManifestPart):
    """Compression of tensors between volunteers (docs/links.md)."""

    LATER = frozenset({"ratio_warmup"})

    codec: CodecName = "none"
    """Strongest codec that a link may use for activations."""
    backward: CodecName | None = None
    """Strongest codec for gradients; None: as for activations."""
    ratio: Annotated[float, Field(ge=1, le=1000)] = 100.0
    """Largest compression ratio of a link."""
    ratio_warmup: Count = 0
    """First steps, in which that ratio rises from 4."""
    adaptive: bool = True
    """True: only slow links compress, as far as it helps. False: every link compresses by `ratio`."""
    feedback: bool = False
    """Error feedback: add what compression lost of a gradient to the next one of that border or block."""
    reduce: ReduceCodecName = "none"
    """Codec for gradients and parameters in a reduce (docs/averaging.md)."""

    def ratio_in(self, batch: int) -> float:
        """Largest compression ratio of a link in batch `batch`, from 0."""
        return warmed_up(self.ratio, batch, self.ratio_warmup)

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        """Codecs for activations and for their gradients."""
        return Codec.of(self.codec), Codec.of(self.backward or self.codec)

    @property
    def sparse(self) -> bool:
        """Whether averaging clusters send what they have moved, in a codec of movements."""
        return Codec.of(self.reduce).of_movements

    @property
    def lossy(self) -> bool:
        """Whether volunteers compute with numbers that a link has rounded, and not they themselves."""
        on_links = self.codec != "none" or self.backward not in (None, "none")
        return on_links or (self.reduce != "none" and not self.sparse)


def checked_share(
    asked: float | None, admission: AdmissionSettings, links: LinkSettings, *, unchecked: bool, grouped: bool
) -> float:
    """Share of contributions to check in a new run: `asked`, or 5 % where strangers may take part.

    Raises `LocalError` HP-RUN-001 if strangers would be admitted unchecked without the author's `unchecked`.
    """
    admits_anybody = admission.policy == "open" and not unchecked
    share = asked if asked is not None else CHECKED_SHARE if admits_anybody else 0.0
    odd = next((str(codec) for codec in links.codecs if not codec.repeatable), None)
    if unchecked and share:
        what, why = (
            f"--unchecked contradicts --spot-checks {share:g}",
            "one of them says that nothing is checked",
        )
        fix = "leave one of them out"
    elif grouped and asked:
        what = "a grouped run cannot have --spot-checks"
        why = "most blocks have one holder in a pipeline, so nobody else can compute the same"
        fix = "leave it out (--robust limits the harm of false parameters), or use --mode exact"
    elif admits_anybody and grouped:
        what = "everybody may take part in this run, and nobody can check a grouped one"
        why = "most blocks have one holder in a pipeline, so nobody else can compute the same"
        fix = "add --unchecked if you trust everybody who may come, or --admission invited"
    elif admits_anybody and odd is not None:
        what = f"everybody may take part in this run, and with the codec {odd} nobody can check it"
        why = "two that compute the same get other bundles"
        fix = (
            "use a codec such as int8, or add --unchecked (you trust all who may come) or --admission invited"
        )
    elif admits_anybody and not share:
        what = "everybody may take part in this run, and nothing would be checked"
        why = "--spot-checks is 0"
        fix = "add --unchecked if you trust everybody who may come, or --admission invited"
    else:
        return share
    raise LocalError("HP-RUN-001", what, why=why, fix=fix, exit_code=ExitCode.CONFIG)


AUTO: Final = "auto"
"""Stands for the codec that `widest_codec` names."""


def widest_codec(admission: AdmissionSettings, asked: float | None, *, unchecked: bool, grouped: bool) -> str:
    """Strongest codec that links of a new run may choose from: `int8` where work is checked.

    Two volunteers that compute the same must send nearly the same then. Raises as `checked_share` does, whose
    arguments these are.
    """
    links = LinkSettings(codec="int8")
    share = checked_share(asked, admission, links, unchecked=unchecked, grouped=grouped)
    return "int8" if share else "topk-int4"


class Outer(ManifestPart):
    """Outer optimizer: Nesterov momentum on averaged results (DiLoCo; averaging/optim/outer_optimizer.py)."""

    learning_rate: Annotated[float, Field(gt=0, le=2)] = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    @property
    def keeps(self) -> tuple[str, ...]:
        return "outer_anchor", "outer_momentum"


SPARSE_OUTER: Final = {"learning_rate": 1.0, "momentum": 0.0}
"""Usual settings with sparse updates: what was not sent takes the place of momentum (SparseLoCo)."""


class AveragingSettings(ManifestPart):
    """Mode `grouped`: clusters train their own batches and average with ready ones (docs/grouped.md)."""

    span: Positive = 10
    """Consecutive groups of each cluster within which all clusters are connected."""
    interval: Positive = 1
    """Batches that a cluster trains between averagings."""
    delayed: bool = False
    """Whether a cluster trains the next batches while the last ones are averaged."""
    corrected: bool = False
    """Whether Adam's second moments are those of the group's mean gradient (SDPipe, section 4)."""
    window_s: Annotated[float, Field(ge=0)] | Literal["adaptive", "all"] = "adaptive"
    """Seconds that the first ready cluster waits for others; `all`: for all; `adaptive`: while it pays."""
    outer: Outer | None = None
    """Outer optimizer; None: a cluster continues from the mean."""
    robust: bool = False
    """Whether parameters far from the others' are clipped: a few clusters cannot move the mean far."""


def sparse_fault(averaging: AveragingSettings | None) -> str | None:
    """Reason why averagings of these settings cannot be sparse (docs/averaging.md); None: they can be."""
    if averaging is None or averaging.outer is None:
        return "only an outer optimizer has movements to send (--mode grouped --outer nesterov)"
    if averaging.window_s != "all":
        return "all clusters must be in every averaging (--window all)"
    if averaging.delayed:
        return "a mean must be installed at once by all clusters (without --delayed)"
    if averaging.robust:
        return "of most numbers nothing is sent, so nothing is far from the others (without --robust)"
    return None


class TrainingSettings(ManifestPart):
    """Training settings. A step updates the parameters once, with `batch_size` samples."""

    LATER = frozenset({"eval_samples", "last_staleness", "on_bad_sample"})

    steps: Positive = 60
    batch_size: Positive = 128
    microbatch_size: Positive = 8
    """Samples of a microbatch; the last microbatch of a step has the rest."""
    eval_every: Positive = 10
    """Steps between evaluations; the last step is always evaluated."""
    eval_microbatches: Positive = 4
    eval_samples: Positive | None = None
    """Held-out samples of an evaluation, each once; None, as in runs of before: its microbatches are full."""
    checkpoint_every: Positive = 10
    slot_size: Positive = 4
    """Microbatches that a gradient slot may hold: a lost volunteer costs at most so many per block."""
    optimizer: AnyRule = AdamW()
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 5e-4
    schedule: Annotated[tuple[tuple[Count, Factor], ...], Field(min_length=1, max_length=10_000)] = (
        (1, 1.0),
    )
    """Knots (step from 1, learning-rate factor), linear in between (averaging/optim/learning_rate.py)."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.1
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest 2-norm of the whole model's gradient; None does not clip."""

    dtype: Literal["float32", "bf16"] = "float32"
    """Data type of computation; parameters, gradients and moments are always float32."""
    recompute: bool = False
    """Activation recomputation: blocks run forward twice instead of keeping activations."""
    staleness: Annotated[int, Field(ge=0, le=8)] = 0
    """Steps that may begin before the previous commit, with older parameters (docs/asynchronous.md)."""
    fresh_steps: Count = 0
    """Steps at the start of the run (grouped runs: batches) that do not overlap."""
    head_start: Positive | None = None
    """Microbatches of an overlapping step that use older parameters; the others wait. None: all use them."""
    last_staleness: Count | None = None
    """Staleness of the last stage; each stage before it may be one step more behind, up to `staleness`.
    None: all stages may be as stale."""
    compensation: Annotated[float, Field(ge=0, le=100)] = 0.0
    """λ of the delay compensation of stale gradients (DC-ASGD)."""

    on_bad_sample: Literal["halt", "skip"] = "halt"
    """Consequence of a microbatch that cannot be computed from its data (docs/trust.md)."""

    groups: tuple[ParameterGroup, ...] = ()
    """Parameter groups; the first one that matches a parameter's name applies."""

    @property
    def keeps_cast(self) -> bool:
        """Whether a GPU may keep copies of weights in bfloat16 where autocast casts them anyway.

        Corrections of stale gradients need all bits of the older versions.
        """
        return self.dtype == "bf16" and not self.compensation

    @property
    def update(self) -> dict[str, Setting]:
        """Settings from which averaging/optim/update_rules.py builds the update rule."""
        common = {name: getattr(self, name) for name in ("learning_rate", "weight_decay", "schedule")}
        return self.optimizer.model_dump() | common

    @property
    def microbatches(self) -> int:
        """M: microbatches of one step."""
        return -(-self.batch_size // self.microbatch_size)

    @property
    def ids(self) -> int:
        """Upper bound of microbatch ids in a step, held-out microbatches included."""
        return self.microbatches + self.eval_microbatches

    def most_behind(self, step: int, batch: int) -> int:
        """Most updates by which step `step`'s parameters may be stale when it computes `batch`."""
        return 0 if batch < self.fresh_steps else min(self.staleness, step)

    def samples_of(self, number: int) -> int:
        """Samples of microbatch `number`; ids from M on are held-out microbatches."""
        return size_of(number, self.batch_size, self.microbatch_size, self.eval_samples)

    def evaluating(self, samples: int) -> TrainingSettings:
        """These settings with evaluations of `samples` held-out samples, each once."""
        microbatches = -(-samples // self.microbatch_size)
        return self.model_copy(update={"eval_samples": samples, "eval_microbatches": microbatches})

    def stage_bounds(self, stages: int) -> tuple[int, ...]:
        """Most versions that each of so many stages is behind, first stage first; empty: there is no bound.

        Raises ValueError if none of them may be `staleness` behind.
        """
        least = self.last_staleness
        if least is None:
            return ()
        if (first := least + stages - 1) < self.staleness:
            raise ValueError(
                f"training.staleness {self.staleness} is more than {first}, which is the most that the first "
                f"of {stages} stages is behind with training.last_staleness {least}"
            )
        return tuple(min(self.staleness, least + after) for after in reversed(range(stages)))

    @model_validator(mode="after")
    def _sizes_fit(self) -> TrainingSettings:
        """Refuse settings that contradict one another."""
        if self.microbatch_size > self.batch_size:
            raise ValueError(
                f"training.microbatch_size {self.microbatch_size} is above training.batch_size "
                f"{self.batch_size}"
            )
        if self.eval_samples and self.eval_microbatches != -(-self.eval_samples // self.microbatch_size):
            raise ValueError(
                f"training.eval_microbatches {self.eval_microbatches} is not what training.eval_samples "
                f"{self.eval_samples} need"
            )
        if any(step >= later for (step, _), (later, _) in pairwise(self.schedule)):
            raise ValueError("the steps of training.schedule do not rise")
        if self.fresh_steps and not self.staleness:
            raise ValueError(
                f"training.fresh_steps {self.fresh_steps} is of steps that overlap later (training.staleness)"
            )
        if self.fresh_steps >= self.steps:
            raise ValueError(
                f"training.fresh_steps {self.fresh_steps} (by default those of the warm-up) leaves none of "
                f"{self.steps} steps to overlap"
            )
        if self.head_start is not None and not (self.staleness and self.head_start <= self.microbatches):
            raise ValueError(
                f"training.head_start {self.head_start} is not of {self.microbatches} microbatches of steps "
                "that overlap (training.staleness)"
            )
        if self.head_start is not None and self.compensation:
            raise ValueError(
                "training.compensation is for steps whose microbatches are all as old, and "
                "training.head_start for others"
            )
        if self.last_staleness is not None and self.last_staleness >= self.staleness:
            raise ValueError(
                f"training.last_staleness {self.last_staleness} is not below training.staleness "
                f"{self.staleness}: leave it out, and all stages are as stale"
            )
        if self.last_staleness is not None and self.compensation:
            raise ValueError(
                "training.compensation is for steps whose blocks are all as old, and "
                "training.last_staleness for others: copies of a parameter that blocks share would differ"
            )
        if self.slot_size > self.microbatches:
            raise ValueError(
                f"training.slot_size {self.slot_size} is above the {self.microbatches} microbatches of a step"
            )
        return self
