"""Layout of a run directory, which `hetpeer init` makes and the coordinator serves and fills.

manifest.hetpeer   signed; everything else is checked against it
owner.key          Ed25519, signs the manifest      identity.key   the coordinator's libp2p identity
graph/             block-000.graph …                state/         initial-000.safetensors …
data/              shards of samples                checkpoints/   sealed and growing checkpoints
log/ledger.log     the coordinator's decisions      volunteers/    volunteers' signed events, a file each
amendment.hetpeer  the latest amendment, signed (membership_config.py)
author.json        paths of the author's modules and texts on the author's machine
metrics.jsonl      the training curve, from the log (storage/metrics_file.py)
author/            configuration and tokenizer of a model of transformers, on the author's machine
invite             argument for `hetpeer join`, as of the last time the run was served
control.sock       control socket of the running reliable peer         daemon.log   its log
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ConfigDict, ValidationError

from hetpeer.bootstrap.run.durable_files import hash_file, safe_join
from hetpeer.bootstrap.run.manifest import BlockEntry, Manifest, SignedManifest, read_file
from hetpeer.bootstrap.run.manifest_files import FileRef
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.block.block_state import Layout, layout_of
from hetpeer.stages.data.microbatches import DataPlan, MicrobatchReader
from hetpeer.stages.data.sample_weights import read_weights
from hetpeer.stages.graph.block_spec import BlockSpec

FOLDERS = ("graph", "state", "data", "checkpoints", "log", "volunteers")


class LayerBottleneck(BaseModel):
    """A bottleneck behind a layer of the author's (authoring/bottlenecks.py)."""

    model_config = ConfigDict(frozen=True)

    layer: str
    """Path of the layer in the author's module."""
    dim: int
    """Dimension of the layer's output that becomes narrow: 1 or -1."""
    width: int
    tokens: bool
    """Whether it has a table of tokens."""
    start: tuple[int, ...] = ()
    """Sizes of what is added to every sample; empty: nothing is."""
    centered: bool = False
    """Whether what is the same for every sample is taken out of the features before they cross."""


class Bottlenecks(BaseModel):
    """The bottlenecks between the stages of a model."""

    model_config = ConfigDict(frozen=True)

    rank: int
    """Features that cross a border."""
    embedding: str
    """Path of the embedding whose ids the tables of tokens take; empty: there are none."""
    places: tuple[LayerBottleneck, ...]


class Author(BaseModel):
    """Content of `author.json`: references that exist on the author's machine only."""

    model_config = ConfigDict(frozen=True)

    model: str
    """`/absolute/path/module.py:function`, or `hf:` and a folder or the hub's id."""
    task: str | None = None
    """Task of the model; None: that of its checkpoint, or causal-lm."""
    part: str | None = None
    """Name of the one model of transformers in the module; empty: the module itself; None: there is none."""
    chats: bool = False
    """Whether the data are chats, written by the tokenizer's template."""
    loss: str | None = None
    """Reference of the loss function; None: the model returns its loss."""
    data: tuple[str, ...]
    """Reference of the function that yields samples, or paths of texts; empty: Python's standard library."""
    eval_data: tuple[str, ...] = ()
    """The same for evaluation data; empty: a part of `data` is held out."""
    lora: str | None = None
    """Adapters in the model, in the words of `--lora`; None: there are none."""
    bottlenecks: Bottlenecks | None = None
    """Bottlenecks in the model; None: there are none."""
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Factor and offset of each channel by which the model scales its images; None: it does not."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run directory with a checked manifest; other files are checked when used, or by `verify`."""

    path: Path
    signed: SignedManifest

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Read and check the manifest. Raises `LocalError` HP-RUN-001 … HP-RUN-004."""
        return cls(path, read_file(path / "manifest.hetpeer"))

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    @property
    def run_id(self) -> str:
        return self.signed.run_id

    @property
    def identity_path(self) -> Path:
        """Key of the identity of the reliable peer in this directory."""
        return self.path / "identity.key"

    @property
    def invite_path(self) -> Path:
        return self.path / "invite"

    @property
    def named_path(self) -> Path:
        """Addresses of this reliable peer that the author has named, a line each; first in an invite."""
        return self.path / "addresses"

    def owner_key(self) -> Ed25519PrivateKey:
        """Key that signs the manifest and its amendments. Raises `LocalError` HP-RUN-015."""
        try:
            return Ed25519PrivateKey.from_private_bytes((self.path / "owner.key").read_bytes())
        except (OSError, ValueError) as error:
            raise LocalError(
                "HP-RUN-015",
                f"{self.path} has no key of the run's owner",
                why="owner.key is missing or damaged",
                fix="do this on the machine where hetpeer init was run",
                exit_code=ExitCode.CONFIG,
            ) from error

    @property
    def log_path(self) -> Path:
        """Log of the run: its decided records."""
        return self.path / "log" / "ledger.log"

    @property
    def journal_path(self) -> Path:
        """Journal of the consensus (raft): terms, votes and entries, decided or not."""
        return self.path / "log" / "raft.log"

    @property
    def metrics_path(self) -> Path:
        """The training curve as a text file, which a reliable peer writes from the log."""
        return self.path / "metrics.jsonl"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def volunteers(self) -> Path:
        return self.path / "volunteers"

    def graph_path(self, block: BlockEntry) -> Path:
        return safe_join(self.path / "graph", block.graph.name)

    def state_path(self, block: BlockEntry) -> Path:
        return safe_join(self.path / "state", block.state.name)

    def files(self) -> Iterator[tuple[FileRef, Path]]:
        """Every file the manifest names, and where it is."""
        for block in self.manifest.blocks:
            yield block.graph, self.graph_path(block)
            yield block.state, self.state_path(block)
            if block.buffers:
                yield block.buffers, safe_join(self.path / "state", block.buffers.name)
        if self.manifest.rest:
            yield self.manifest.rest, safe_join(self.path / "state", self.manifest.rest.name)
        for shard in (*self.manifest.data.train, *self.manifest.data.heldout):
            yield shard, safe_join(self.data, shard.name)
        if self.manifest.data.weights:
            yield self.manifest.data.weights, safe_join(self.data, self.manifest.data.weights.name)

    def constant_paths(self) -> list[Path]:
        """Safetensors of buffers and of what no block needs: not trained. Raises `LocalError` HP-RUN-005."""
        files = [*(block.buffers for block in self.manifest.blocks), self.manifest.rest]
        paths = []
        for file in filter(None, files):
            paths.append(safe_join(self.path / "state", file.name))
            check_file(file, paths[-1])
        return paths

    def buffers_path(self, block: BlockEntry) -> Path | None:
        """File of the block's constant tensors; None if it has none. Raises `LocalError` HP-RUN-005."""
        if block.buffers is None:
            return None
        path = safe_join(self.path / "state", block.buffers.name)
        check_file(block.buffers, path)
        return path

    def verify(self) -> None:
        """Check every file of the manifest. Raises `LocalError` HP-RUN-005 that names the first bad one."""
        for reference, path in self.files():
            check_file(reference, path)

    def batches(self) -> MicrobatchReader:
        """Microbatches of the run, of the shards that are here."""
        return MicrobatchReader(self.data, self.manifest.data_plan)

    def weighted_plan(self) -> DataPlan:
        """Samples and weights of each microbatch. Raises `LocalError` HP-RUN-005 if the weights are damaged.

        Volunteers do not have that file: `Begin` tells them a step's weights.
        """
        file, plan = self.manifest.data.weights, self.manifest.data_plan
        if file is None:
            return plan
        path = safe_join(self.data, file.name)
        check_file(file, path)
        try:
            return replace(plan, weights=read_weights(path))
        except ValueError as error:
            raise _not_the_file(path, str(error)) from error

    def block_spec(self, block: BlockEntry) -> BlockSpec:
        """The block's graph, checked against the manifest. Raises `LocalError` HP-RUN-005."""
        from hetpeer.stages.graph.safety_check import unpack_block

        return unpack_block(self._graph(block))

    def layouts(self) -> list[Layout]:
        """Parameter names and shapes of every block, from the graphs. Raises `LocalError` HP-RUN-005."""
        from hetpeer.stages.graph.block_wire import read_block

        return [layout_of(read_block(self._graph(block))) for block in self.manifest.blocks]

    def _graph(self, block: BlockEntry) -> bytes:
        path = self.graph_path(block)
        check_file(block.graph, path)
        return path.read_bytes()

    def author(self) -> Author:
        """Folder of the author's module and texts. Raises `LocalError` HP-RUN-006 on any other machine."""
        try:
            return Author.model_validate_json((self.path / "author.json").read_bytes())
        except (OSError, ValidationError) as error:
            raise LocalError(
                "HP-RUN-006",
                f"{self.path} does not say where the author's model is",
                why="author.json is missing or damaged",
                fix="do this on the machine where hetpeer init was run",
                exit_code=ExitCode.CONFIG,
            ) from error


def check_file(reference: FileRef, path: Path) -> None:
    """Raise `LocalError` HP-RUN-005 unless the file has the size and hash the manifest says."""
    try:
        size = path.stat().st_size
        why = f"it has {size} bytes, not {reference.bytes}" if size != reference.bytes else ""
        if not why and hash_file(path) != reference.blake3:
            why = "its content does not have the hash the manifest says"
    except FileNotFoundError:
        why = "the file is missing"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise _not_the_file(path, why)


def _not_the_file(path: Path, why: str) -> LocalError:
    return LocalError(
        "HP-RUN-005",
        f"{path} is not the file the manifest names",
        why=why,
        fix="restore it from a copy, or make the run again with hetpeer init",
        exit_code=ExitCode.VERSION,
    )
