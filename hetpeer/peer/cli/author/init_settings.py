"""Settings of a new run, from the options of `hetpeer init`; refuses options that do not go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetpeer.averaging.optim.learning_rate import knots_of
from hetpeer.averaging.optim.update_rules import rule_settings
from hetpeer.bootstrap.run.manifest import validated
from hetpeer.bootstrap.run.settings import (
    AUTO,
    SPARSE_OUTER,
    AdmissionSettings,
    AveragingSettings,
    LinkSettings,
    TrainingSettings,
    TrustSettings,
    checked_share,
    parameter_group,
    sparse_fault,
    widest_codec,
)
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.cli.author.init_choices import Mode, OuterRule, Shape
from hetpeer.stages.links.codec import sparse_codec_names


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a manifest that options decide."""

    training: TrainingSettings
    links: LinkSettings
    averaging: AveragingSettings | None
    """None: an exact run."""
    admission: AdmissionSettings
    trust: TrustSettings


def settings_of(given: Mapping[str, Any]) -> RunSettings:
    """Settings that the options of `init` mean; `given`: option's parameter name → its value.

    Raises LocalError HP-RUN-001 for options that do not go together, and what the settings' own checks raise.
    """
    training = _training(given)
    averaging = _averaging(given, training)
    admission = _chosen(AdmissionSettings, given, policy=given["admission"])
    links = _links(given, admission, grouped=averaging is not None)
    share = checked_share(
        given["spot_checks"],
        admission,
        links,
        unchecked=given["unchecked"],
        grouped=averaging is not None,
    )
    slot_size = min(training.microbatches, TrainingSettings.model_fields["slot_size"].default)
    return RunSettings(
        training=training.evaluating(given["batch_size"]).model_copy(update={"slot_size": slot_size}),
        links=links,
        averaging=averaging,
        admission=admission,
        trust=TrustSettings(spot_checks=share),
    )


def _chosen(part: type[Any], given: Mapping[str, Any], **others: Any) -> Any:
    """Settings of `part`: from the options of the same name, and `others`."""
    return validated(part, {key: given[key] for key in part.model_fields if key in given} | others)


def _training(given: Mapping[str, Any]) -> TrainingSettings:
    steps, warmup_steps, schedule = given["steps"], given["warmup_steps"], given["schedule"]
    rule = {key: given[key] for key in ("betas", "momentum", "nesterov")} | {"name": given["optimizer"]}
    fresh_steps = given["fresh_steps"]
    settings: TrainingSettings = _chosen(
        TrainingSettings,
        given,
        optimizer=rule | rule_settings(given["optimizer"], given["optimizer_setting"] or ()),
        schedule=knots_of(schedule, steps, warmup_steps, given["final_ratio"]),
        clip_norm=given["clip_norm"] or None,
        fresh_steps=(warmup_steps if given["staleness"] else 0) if fresh_steps is None else fresh_steps,
        groups=[parameter_group(text) for text in given["group"] or ()],
        slot_size=1,  # of a step with few microbatches the default would be too much
        eval_samples=None,  # it is known when the data is read
    )
    if schedule is not Shape.CONSTANT and warmup_steps >= steps:
        raise _contradiction(
            f"--schedule {schedule} has no step to fall in",
            f"the learning rate rises for {warmup_steps} steps, and the run has {steps}",
            "give more --steps, or fewer --warmup-steps",
        )
    return settings


def _averaging(given: Mapping[str, Any], training: TrainingSettings) -> AveragingSettings | None:
    outer, window, mode = given["outer"], given["window"], given["mode"]
    given_outer = {"learning_rate": given["outer_learning_rate"], "momentum": given["outer_momentum"]}
    of_outer = {name: value for name, value in given_outer.items() if value is not None}
    if of_outer and outer is OuterRule.NONE:
        raise _contradiction(
            "--outer-learning-rate and --outer-momentum have no effect without an outer optimizer",
            "--outer is none",
            "leave them out, or add --outer nesterov",
        )
    if not _is_window(window):
        raise _contradiction(
            f"--window {window} is no time to wait",
            "it is a number of seconds from 0 on, adaptive or all",
            "give one of these",
        )
    sparse = given["reduce_codec"] in sparse_codec_names()
    averaging: AveragingSettings = _chosen(
        AveragingSettings,
        given,
        window_s="all" if sparse and window == "adaptive" else window,
        outer=None if outer is OuterRule.NONE else (SPARSE_OUTER if sparse else {}) | of_outer,
    )
    if sparse and (fault := sparse_fault(averaging if mode is Mode.GROUPED else None)):
        raise _contradiction(
            f"--reduce-codec {given['reduce_codec']} does not go with the other options",
            fault,
            "change that option, or use another --reduce-codec",
        )
    if averaging.corrected and not training.optimizer.keeps_of_mean:
        raise _contradiction(
            f"--corrected has no effect with --optimizer {given['optimizer']}",
            "it has no second moments",
            "leave it out, or use AdamW or NAdam",
        )
    if mode is Mode.EXACT and averaging != AveragingSettings():
        raise _contradiction(
            "--span, --window, --interval, --delayed, --corrected, --robust and --outer have no effect in "
            "an exact run",
            "pipelines of an exact run always have the same parameters",
            "leave them out, or add --mode grouped",
        )
    return averaging if mode is Mode.GROUPED else None


def _is_window(text: str) -> bool:
    """Whether `text` is a wait window: seconds, or one of the words."""
    try:
        validated(AveragingSettings, {"window_s": text})
    except LocalError:
        return False
    return True


def _links(given: Mapping[str, Any], admission: AdmissionSettings, *, grouped: bool) -> LinkSettings:
    codec = given["codec"]
    if codec == AUTO:
        if given["uniform"]:
            raise _contradiction(
                "--codec auto does not go with --uniform",
                "one chooses for each link, the other compresses all alike",
                "leave one of them out",
            )
        codec = widest_codec(admission, given["spot_checks"], unchecked=given["unchecked"], grouped=grouped)
    settings: LinkSettings = _chosen(
        LinkSettings,
        given,
        codec=codec,
        backward=given["backward_codec"],
        adaptive=not given["uniform"],
        reduce=given["reduce_codec"],
    )
    return settings


def _contradiction(problem: str, why: str, fix: str) -> LocalError:
    return LocalError("HP-RUN-001", problem, why=why, fix=fix, exit_code=ExitCode.CONFIG)
