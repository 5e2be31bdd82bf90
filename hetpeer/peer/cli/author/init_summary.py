"""The lines that `hetpeer init` prints of the run that it has made."""

from __future__ import annotations

from collections.abc import Iterator

from hetpeer.bootstrap.run.admission_policies import ADMISSION_POLICIES
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.step_workload import constant_bytes
from hetpeer.peer.limits.amounts import bytes_text, counted


def summary(run: RunDirectory, *, of_library: bool, adapters: bool) -> Iterator[str]:
    """Name, sizes, admission and checks of `run`.

    `of_library`: the data is the text of Python's library. `adapters`: the model itself is frozen.
    """
    manifest = run.manifest
    samples = sum(shard.samples for shard in manifest.data.train)
    yield f"run {manifest.name}  id {run.run_id}"
    sizes = f"{counted(len(manifest.blocks), 'block')}, {manifest.parameters:,} parameters"
    yield f"{sizes}, {samples:,} training samples, {counted(manifest.training.steps, 'step')}"
    if adapters:
        frozen = sum(constant_bytes(block) for block in manifest.blocks)
        yield f"frozen: {bytes_text(frozen)}; a volunteer fetches its part once, and no checkpoint has it"
    if of_library:
        yield "data: the source text of Python's library; choose other data with --data"
    share, policy = manifest.trust.spot_checks, ADMISSION_POLICIES[manifest.admission.policy]
    checked = f"{share:.0%} of their work is computed a second time and compared"
    choice = "--spot-checks 0.05 checks some of it"
    if manifest.averaging is not None:
        choice = "nobody can check a grouped run"  # most blocks have one holder in a pipeline
    trusted = f"their work is not checked ({choice})"
    how = f" ({policy.how})" if policy.how else ""
    yield f"{policy.describe}{how}; {checked if share else trusted}"
