"""The manifest: the definition of a run by content hash, signed by the run's owner.

A volunteer trusts this file and the run's id, and nothing else. The id is a hash of the owner's key and the
signed bytes, so nobody can give a volunteer that knows the id another model, other data or other settings.
A manifest with a setting that this version does not know is refused: training without it would be another
run. Unknown fields at the top are ignored, unless `needs` names them (docs/protocol.md, "Versions").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, Field, ValidationError, model_validator

from hetpeer.averaging.reduce.tied_parameters import Tie
from hetpeer.bootstrap.run.amendment import SignedAmendment, read_amendment
from hetpeer.bootstrap.run.manifest_files import DataSettings, Digest, FileRef, Name
from hetpeer.bootstrap.run.owner_signature import (
    MANIFEST,
    Coordinators,
    Count,
    ManifestPart,
    unknown_field,
)
from hetpeer.bootstrap.run.settings import (
    AdmissionSettings,
    AveragingSettings,
    LinkSettings,
    Outer,
    Setting,
    TrainingSettings,
    TrustSettings,
    sparse_fault,
)
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.untrusted import first_wrong
from hetpeer.stages.data.microbatches import DataPlan
from hetpeer.stages.links.codec import EXACT_TOLERANCE, Codec
from hetpeer.stages.pipeline.delays import EVERY_ID, Delays
from hetpeer.stages.pipeline.place_memory import Upkeep

WIRE_VERSION: Final = 1

MOST_POOLS: Final = 1000
"""Pools of grants that a link has room for, roundly (dht/streams/flow_control.py)."""
CHECKED: Final = 2
"""Spot checks asked of a volunteer in a step, each with a vector: its own, and one as a third party."""
TOLERANCE: Final[Mapping[str, float]] = {"float32": EXACT_TOLERANCE, "bf16": 0.05}
"""Data type of computation → largest relative distance of two honest sums; codecs have their own."""

Range = tuple[Count, Count]
Model = TypeVar("Model", bound=BaseModel)


class BlockEntry(ManifestPart):
    """One block: its graph, its initial state and what it costs per microbatch."""

    LATER = frozenset({"cast_count", "looked_up_count"})

    index: Count
    graph: FileRef
    state: FileRef
    state_digest: Digest
    """Digest of the initial state (`BlockState.digest`); holders report it when they are ready."""
    buffers: FileRef | None = None
    """Safetensors with the block's constant tensors (masks, frozen parameters), in the states' folder."""
    parameter_count: Count
    vector_count: Count
    """Elements of the block's flat vector: parameters, then BatchNorm's running values."""
    cast_count: Count = 0
    """Elements of parameters of which a GPU may keep copies in bfloat16 (stages/graph/parameter_reads.py)."""
    looked_up_count: Count = 0
    """Elements of tables in which rows are looked up: a microbatch's gradient has only these rows."""
    parameter_bytes: Count
    flops_forward: Count
    activation_bytes: Count
    output_bytes: Count


class Manifest(ManifestPart):
    """Everything that defines a run. Cluster c of the swarm cuts the model by `layouts[c % len(layouts)]`."""

    LATER = frozenset({"needs"})

    wire_version: int = WIRE_VERSION
    needs: Annotated[tuple[Name, ...], Field(max_length=64)] = ()
    """Fields of the manifest itself that every reader must know."""
    name: Name
    seed: Count
    owner: Annotated[bytes, Field(min_length=32, max_length=32)]
    """The owner's Ed25519 public key."""
    coordinators: Coordinators
    """Reliable peers at the start of the run."""
    blocks: Annotated[tuple[BlockEntry, ...], Field(min_length=1, max_length=4096)]
    data: DataSettings
    training: TrainingSettings
    links: LinkSettings = LinkSettings()
    admission: AdmissionSettings = AdmissionSettings()
    trust: TrustSettings = TrustSettings()
    averaging: AveragingSettings | None = None
    """None: every update is that of one machine (mode `exact`)."""
    ties: tuple[Tie, ...] = ()
    """Parameters that several blocks share."""
    counters: Mapping[str, Count] = Field(default_factory=dict)
    """BatchNorm's counters of forward passes in the author's state dict → their values at init."""
    state_dict: Mapping[str, str] = Field(default_factory=dict)
    """Name in the author's state dict → name of that tensor in its block or in `rest`."""
    rest: FileRef | None = None
    """Tensors of the state dict that the loss does not need; in the folder of the states."""
    layouts: Annotated[tuple[Annotated[tuple[Range, ...], Field(min_length=1)], ...], Field(min_length=1)]
    """Each layout is a list of stages, as block ranges [begin, end)."""

    @model_validator(mode="after")
    def _fits_together(self) -> Manifest:
        """Refuse blocks that are not numbered in order, and layouts that do not cover them once."""
        if [block.index for block in self.blocks] != list(range(len(self.blocks))):
            raise ValueError("blocks must be numbered 0, 1, 2, … in order")
        for number, layout in enumerate(self.layouts):
            borders = [0, *(end for _, end in layout)]
            if [begin for begin, _ in layout] != borders[:-1] or borders[-1] != len(self.blocks):
                raise ValueError(
                    f"layouts[{number}] must cover blocks 0 to {len(self.blocks)} without gap or overlap"
                )
            if any(begin >= end for begin, end in layout):
                raise ValueError(f"layouts[{number}] has an empty stage")
        return self

    @model_validator(mode="after")
    def _can_be_checked(self) -> Manifest:
        for codec in self.links.codecs if self.trust.spot_checks else ():
            if not codec.repeatable:
                raise ValueError(
                    f"trust.spot_checks does not go with links.codec {codec}: two that compute the same get "
                    "other bundles"
                )
        return self

    @model_validator(mode="after")
    def _can_be_robust(self) -> Manifest:
        if self.averaging is not None and self.averaging.robust and self.ties:
            raise ValueError(
                "averaging.robust does not go with parameters that blocks share: each block would clip them "
                "otherwise"
            )
        return self

    @model_validator(mode="after")
    def _has_stages_to_be_stale(self) -> Manifest:
        most = self.training.staleness
        bounds = self.training.stage_bounds(len(self.layouts[0]))
        if bounds and len(self.blocks) > (room := MOST_POOLS // (most + 3)):
            raise ValueError(
                f"training.last_staleness goes with up to {room} blocks if training.staleness is {most}, and "
                f"this model has {len(self.blocks)}: each step under way has grants of its own"
            )
        return self

    @model_validator(mode="after")
    def _can_be_sparse(self) -> Manifest:
        if not self.links.sparse:
            return self
        if why := sparse_fault(self.averaging):
            raise ValueError(f"links.reduce {self.links.reduce}: {why}")
        counted = next((block for block in self.blocks if block.vector_count > block.parameter_count), None)
        if counted is not None:
            raise ValueError(
                f"links.reduce {self.links.reduce} does not go with running statistics (BatchNorm) as block "
                f"{counted.index} has them: they are no movement"
            )
        return self

    @property
    def delays(self) -> Delays:
        """Versions that the microbatches of steps that overlap are computed with.

        Stages are those of the first layout, whoever holds them.
        """
        training, stages = self.training, self.layouts[0]
        bounds = training.stage_bounds(len(stages))
        begins = [begin for begin, _ in stages]
        early = EVERY_ID if training.head_start is None else training.head_start
        return Delays(head_start=early, stages=tuple(zip(begins, bounds, strict=True)) if bounds else ())

    @property
    def parameters(self) -> int:
        """Elements of all parameters; one that several blocks share counts once, as in torch."""
        repeated = sum(end - begin for tie in self.ties for _, begin, end in tie.uses[1:])
        return sum(block.parameter_count for block in self.blocks) - repeated

    @property
    def tolerance(self) -> float:
        """Largest distance of two honest volunteers' sums, relative to their length."""
        codecs = *self.links.codecs, Codec.of(self.links.reduce)
        return max(TOLERANCE[self.training.dtype], *(codec.tolerance for codec in codecs))

    @property
    def data_plan(self) -> DataPlan:
        """Samples of each microbatch, and how to read them; weights are in `RunDirectory.weighted_plan`."""
        return DataPlan.of(self.model_dump(include={"seed", "data", "training"}))

    @property
    def outer(self) -> Outer | None:
        """Outer optimizer of the averaging; None if the run has none."""
        return None if self.averaging is None else self.averaging.outer

    @property
    def outer_rule(self) -> dict[str, Setting] | None:
        """Settings of that optimizer's rule (averaging/optim/outer_optimizer.py)."""
        return None if self.outer is None else self.outer.model_dump() | {"sparse": self.links.sparse}

    @property
    def optimizer_state(self) -> tuple[str, ...]:
        """Names of the vectors kept of a block besides its parameters (stages/block/block_state.py)."""
        rule = self.training.optimizer
        of_mean = rule.keeps_of_mean if self.averaging is not None and self.averaging.corrected else ()
        outer = () if self.outer is None else self.outer.keeps
        return rule.keeps + of_mean + outer

    @property
    def upkeep(self) -> Upkeep:
        """Numbers that a holder keeps of each parameter besides weight, gradient and one step's slots."""
        # the copy, the mean of copies
        delayed = 2 if self.averaging is not None and self.averaging.delayed else 0
        rounded = self.links.reduce != "none" and not self.links.sparse
        # what parts and sums have lost, before and now
        gradients = 4 if rounded and self.links.feedback else 0
        parameters = 3 if rounded and self.averaging is not None else 0  # parts, now; sums, before and now
        checks = CHECKED if self.trust.spot_checks else 0
        kept = len(self.optimizer_state) + delayed + gradients + parameters + checks
        in_state = 1 + len(self.optimizer_state)
        behind = self.training.staleness
        return Upkeep(kept=kept, behind=behind, means=1 if delayed and behind else 0, in_state=in_state)

    def layout(self, cluster: int) -> tuple[Range, ...]:
        """The stages of a cluster, as block ranges [begin, end)."""
        return self.layouts[cluster % len(self.layouts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedManifest:
    """A manifest whose owner's signature was checked; `data` is the file's bytes, `run_id` 32 hex digits."""

    manifest: Manifest
    run_id: str
    data: bytes
    amendment: SignedAmendment | None = None
    """The latest known amendment."""

    @property
    def reliable(self) -> tuple[str, ...]:
        """Ids of the reliable peers."""
        return self.manifest.coordinators if self.amendment is None else self.amendment.amendment.coordinators

    @property
    def sequence(self) -> int:
        """Number of the latest amendment."""
        return 0 if self.amendment is None else self.amendment.amendment.sequence

    def amended(self, data: bytes, *, instead: bool = False) -> SignedManifest:
        """Manifest with the amendment in `data` if its number is higher than the one in force.

        With `instead` one of the same number replaces the one in force, too. Raises `LocalError` HP-RUN-013.
        """
        signed = read_amendment(data, self.manifest.owner, self.run_id)
        number, known = signed.amendment.sequence, self.amendment
        another = instead and known is not None and number == self.sequence and data != known.data
        return replace(self, amendment=signed) if number > self.sequence or another else self


def public_bytes(owner_key: Ed25519PrivateKey) -> bytes:
    """Raw 32 bytes of the public key, for `Manifest.owner`."""
    return owner_key.public_key().public_bytes_raw()


def sign(manifest: Manifest, owner_key: Ed25519PrivateKey) -> bytes:
    """The manifest file: canonical bytes and the owner's signature over them."""
    if manifest.owner != public_bytes(owner_key):
        raise ValueError("the manifest names another owner")
    return MANIFEST.seal(manifest.model_dump(), owner_key)


def read(data: bytes, run: str = "", giver: str = "the peer") -> SignedManifest:
    """Check the signature and every field of a manifest file; `giver` is named in errors.

    Raises `LocalError`: HP-RUN-003 if a byte is wrong, HP-RUN-002 for an unknown version, HP-RUN-016 if the
    manifest is of another run than `run` (empty: any run), HP-RUN-001 if the owner signed impossible values,
    HP-RUN-026 if the manifest has settings that only a newer version knows.
    The fields of another run are not checked, since anybody can sign a manifest of their own.
    """
    try:
        sealed = MANIFEST.open(data)
        fields = sealed.fields()
        owner = fields["owner"]
        if not isinstance(owner, bytes):
            raise ValueError("it names no owner")  # noqa: TRY004, TRY301 - of the file, as all that is wrong with it
        sealed.check(owner)
    except (ValueError, TypeError, KeyError, InvalidSignature) as error:
        raise LocalError(
            "HP-RUN-003",
            "manifest damaged or not signed by its owner",
            why=str(error) or "the signature does not fit",
            fix="fetch the manifest again from somebody you trust",
            exit_code=ExitCode.VERSION,
        ) from error
    version = fields.get("wire_version")
    if version != WIRE_VERSION:
        named = version if isinstance(version, int) else f"of a {type(version).__name__}"
        raise LocalError(
            "HP-RUN-002",
            f"the run speaks wire version {named}, this hetpeer speaks {WIRE_VERSION}",
            why="it was made with another version of hetpeer",
            fix="use the version of hetpeer the run was made for",
            exit_code=ExitCode.VERSION,
        )
    run_id = blake3(owner + sealed.canonical).hexdigest()[:32]
    if run not in ("", run_id):
        raise LocalError(
            "HP-RUN-016",
            f"{giver} serves another run than the one that is to be joined",
            why=f"it serves {run_id}, not {run}",
            fix="ask the run's author for a new invite",
            exit_code=ExitCode.VERSION,
        )
    manifest = validated(Manifest, fields)
    if (name := _not_understood(manifest, fields)) is not None:
        raise LocalError(
            "HP-RUN-026",
            f"this hetpeer is too old for this run: it does not know {name[:200]}",
            why="a newer version made the run, and without that setting something else would be trained",
            fix="update hetpeer, then give the command again",
            exit_code=ExitCode.VERSION,
        )
    return SignedManifest(manifest=manifest, run_id=run_id, data=data)


def _not_understood(manifest: Manifest, fields: Mapping[str, Any]) -> str | None:
    """Path of the first field of `fields` that must be known and is not."""
    known = {name: value for name, value in fields.items() if name in Manifest.model_fields}
    missing = (name for name in manifest.needs if name not in Manifest.model_fields)
    return next(missing, None) or unknown_field(manifest, known)


def read_file(path: Path) -> SignedManifest:
    """`read` of a file. Raises also `LocalError` HP-RUN-004 if there is none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LocalError(
            "HP-RUN-004",
            f"{path.parent} is not a run directory",
            why=f"{path.name} in it cannot be read: {error.strerror}"
            if path.parent.exists()
            else "there is no such folder",
            fix="make one with: hetpeer init DIR --model module.py:function",
            exit_code=ExitCode.CONFIG,
        ) from error
    return read(data)


def validated(model: type[Model], fields: Any) -> Model:
    """Build a pydantic model; `LocalError` HP-RUN-001 names the first wrong field."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        field, what = first_wrong(error)
        raise LocalError(
            "HP-RUN-001",
            f"bad value in the run's settings: {field[:200] or model.__name__}",  # some are by the author
            why=what.removeprefix("Value error, "),
            fix="correct it and give the command again",
            exit_code=ExitCode.CONFIG,
        ) from error
