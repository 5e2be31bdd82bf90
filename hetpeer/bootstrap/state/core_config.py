"""Settings of a coordinator's core, from a run's manifest."""

from __future__ import annotations

import random
import secrets

from hetpeer.averaging.messages import MessageBounds
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.bootstrap.conduct.reputation import CheckRules
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.seat_plan import SeatPlan
from hetpeer.bootstrap.run.step_workload import demand_of, of_links, of_manifest
from hetpeer.bootstrap.state.effects import CoordinatorConfig
from hetpeer.bootstrap.state.membership import BlockDemand
from hetpeer.bootstrap.state.placement_policies import DEFAULT
from hetpeer.dht.channels.redial import longest_absence_s
from hetpeer.stages.block.fingerprint import KEY_BYTES, difference, distance

GATHER_S = 10.0
"""Seconds without a newcomer until the first clusters of a grouped run are founded undivided."""


def message_bounds(manifest: Manifest) -> MessageBounds:
    """Longest messages of a volunteer in the run with this manifest."""
    training = manifest.training
    return MessageBounds(
        blocks=len(manifest.blocks),
        microbatches=training.microbatches + training.eval_microbatches,
        slot=training.slot_size,
        checked=bool(manifest.trust.spot_checks),
        groups=len(training.groups),
    )


def coordinator_config(
    run: RunDirectory,
    *,
    placement: str | None = DEFAULT,
    weighted: bool = False,
    plan: SeatPlan | None = None,
) -> CoordinatorConfig:
    """Settings of a coordinator of `run`; `placement`: policy for newcomers' places, None: no comparison;
    `plan`: who is to be where, unless the log has it already.

    `weighted`: with the samples' weights, as steps need them. Their file is read, which only reliable peers
    have; raises `LocalError` HP-RUN-005 if it is damaged.
    """
    manifest = run.manifest
    data = run.weighted_plan() if weighted else manifest.data_plan
    training = manifest.training
    compares = placement is not None and manifest.averaging is None
    return CoordinatorConfig(
        run=run.run_id,
        steps=training.steps,
        sizes=[training.samples_of(number) for number in range(training.microbatches)],
        weights=None if data.weights is None else data.training_weights,
        evaluation_microbatches=training.eval_microbatches,
        evaluation_weights=list(data.evaluation_weights.values()),
        evaluate_every=training.eval_every,
        checkpoint_every=training.checkpoint_every,
        clip_norm=training.clip_norm,
        skips=training.on_bad_sample == "skip",
        staleness=training.staleness,
        fresh_steps=training.fresh_steps,
        corrected=manifest.averaging is not None and manifest.averaging.corrected,
        averaging_interval=1 if manifest.averaging is None else manifest.averaging.interval,
        averaging_sparse=manifest.links.sparse,
        averaging_delayed=manifest.averaging is not None and manifest.averaging.delayed,
        layouts=manifest.layouts,
        asks=of_manifest(manifest, training.microbatches) if compares else None,
        placement=placement or DEFAULT,
        plan=plan,
        gather_s=0.0 if placement is None or manifest.averaging is None else GATHER_S,
        link_ratio=manifest.links.ratio,
        link_warmup=manifest.links.ratio_warmup,
        compression=of_links(manifest.links),
        return_s=longest_absence_s(len(run.signed.reliable)),
        checks=None
        if not manifest.trust.spot_checks
        else CheckRules(
            share=manifest.trust.spot_checks,
            tolerance=manifest.tolerance,
            proves=manifest.links.reduce == "none",
            draw=random.SystemRandom().random,
            key=lambda: secrets.token_bytes(KEY_BYTES),
            distance=distance,
            difference=difference,
        ),
        ties={block.index: Ties(manifest.ties).partners(block.index) for block in manifest.blocks},
        costs=[
            BlockDemand(
                elements=block.vector_count,
                memory=demand_of(manifest, block),
                flops=float(block.flops_forward),
            )
            for block in manifest.blocks
        ],
    )
