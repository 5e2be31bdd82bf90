"""Checkpoints: the state of every block after the same number of updates, on the coordinator's disk.

Each block's file is written whole and named by version and state digest, so nothing that counts is ever
overwritten. A checkpoint exists only once one log record names the digests of all blocks: `seal` returns that
record and the caller appends it to the log. A crash before that leaves files which no record names, and
`prune` removes them. The run's initial state is version 0; the manifest stands for its record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.run.durable_files import GrowingFile, disk_errors, leave_room
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode, LocalError, ProtocolError
from hetpeer.dht.base.file_pieces import FilePart
from hetpeer.stages.block.block_state import BlockState, Layout
from hetpeer.stages.block.state_file import StateFile

SPARED_BYTES = 16 << 20
"""Free bytes that checkpoints leave to the log: a run without room for it stands still."""


def initial_record(manifest: Manifest) -> Record:
    """Record of version 0."""
    return record_of(0, [block.state_digest for block in manifest.blocks])


class CheckpointStore:
    """Checkpoints of a run directory. One checkpoint is assembled at a time, from one thread."""

    def __init__(self, run: RunDirectory, layouts: Sequence[Layout]) -> None:
        """`layouts` are the blocks' parameter names and shapes, by block index (`RunDirectory.layouts`)."""
        self._run = run
        self._layouts = layouts
        self._version = 0
        self._digests: dict[int, str] = {}

    def begin(self, version: int) -> None:
        """Start a checkpoint of the state after `version` updates; an unfinished one is dropped."""
        self._version = version
        self._digests = {}

    def incoming(self) -> IncomingState:
        """Context with a place for a state that is fetched; nothing stays of it without `put`."""
        return IncomingState(self._run.checkpoints / "state")

    def put(self, version: int, block: int, state: IncomingState, expected_state_digest: str) -> None:
        """Check and keep one block's state; it is durable when this returns.

        Raises `ProtocolError` for another state, `LocalError` HP-DISK-002; then the block is still missing.
        """
        if version != self._version:
            raise ValueError(f"checkpoint {self._version} is being made, not {version}")
        path = self._path(version, block, expected_state_digest)
        with disk_errors(path):
            self._check(state.part, version, block, expected_state_digest)
        state.keep(path)
        self._digests[block] = expected_state_digest

    def has_kept(self, version: int, block: int, state_digest: str) -> bool:
        """Use a stored file of an unfinished checkpoint in place of `put`. Returns whether there is one."""
        if not self._path(version, block, state_digest).is_file():
            return False
        self._digests[block] = state_digest
        return True

    def seal(self, version: int) -> Record:
        """The log record of a complete checkpoint. Raises ValueError while a block is missing."""
        missing = set(range(len(self._layouts))).difference(self._digests)
        if version != self._version or missing:
            raise ValueError(f"checkpoint {version} lacks blocks {sorted(missing)}")
        return record_of(version, [self._digests[block] for block in range(len(self._layouts))])

    def has(self, record: Record, block: int | None = None) -> bool:
        """Whether the files of a sealed checkpoint (or of one block) exist; `open` checks their content."""
        blocks = range(len(record["blocks"])) if block is None else (block,)
        return all(self._path(record["version"], b, record["blocks"][b]).is_file() for b in blocks)

    def open(self, record: Record, block: int) -> FilePart:
        """State file of one block. Raises `LocalError` HP-CKPT-001 unless it is the sealed state."""
        return self._open(record, block)[0]

    def state(self, record: Record, block: int) -> StateFile:
        """State of one block, to be read in its file. Raises as `open`."""
        return self._open(record, block)[1]

    def load_state(self, record: Record, block: int) -> BlockState:
        """State of one block, in memory. Raises as `open`."""
        _, file = self._open(record, block)
        with _damaged(self._path(record["version"], block, record["blocks"][block])):
            return file.state()

    def prune(self, sealed: Sequence[Record]) -> None:
        """Delete all files but those of the `sealed` checkpoints and of the one in progress."""
        wanted = {
            self._path(record["version"], block, digest)
            for record in sealed
            for block, digest in enumerate(record["blocks"])
        }
        wanted |= {self._path(self._version, block, digest) for block, digest in self._digests.items()}
        with disk_errors(self._run.checkpoints):
            for path in self._run.checkpoints.iterdir():
                if path not in wanted:
                    path.unlink()

    def _path(self, version: int, block: int, digest: str) -> Path:
        if version == 0:
            return self._run.state_path(self._run.manifest.blocks[block])
        return self._run.checkpoints / f"v{version:08}-block-{block:03}-{digest[:16]}.safetensors"

    def _open(self, record: Record, block: int) -> tuple[FilePart, StateFile]:
        """File of `block` in a checkpoint, checked. Raises `LocalError` HP-CKPT-001 if damaged."""
        version, digest = record["version"], record["blocks"][block]
        path = self._path(version, block, digest)
        with _damaged(path):
            part = FilePart.whole(path)
            return part, self._check(part, version, block, digest)

    def _check(self, part: FilePart, version: int, block: int, digest: str) -> StateFile:
        file = StateFile(part, block, self._layouts[block], self._run.manifest.optimizer_state)
        if file.version != version or file.digest() != digest:
            raise ProtocolError(
                f"the state of block {block} is not the one of version {version} that was agreed on"
            )
        return file


class IncomingState(GrowingFile):
    """A file for a state that is fetched; it leaves SPARED_BYTES of the disk free."""

    def begin(self, nbytes: int) -> None:
        """Drop what was written; `nbytes` are to come. Raises `LocalError` HP-DISK-002 if they do not fit."""
        super().begin(nbytes)
        leave_room(self.place, nbytes + SPARED_BYTES)


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Context that turns what is wrong with a checkpoint's file into `LocalError` HP-CKPT-001."""
    try:
        yield
    except (OSError, ProtocolError) as error:
        why = error.what if isinstance(error, ProtocolError) else error.strerror or str(error)
        raise LocalError(
            "HP-CKPT-001",
            f"checkpoint file {path} is damaged",
            why=why,
            fix="restore the file from a copy: another reliable peer has one",
            exit_code=ExitCode.VERSION,
        ) from error


def record_of(version: int, digests: Sequence[str], cluster: int = 0) -> Record:
    """Record of a complete checkpoint, with the blocks' state digests in order."""
    whose = {"cluster": cluster} if cluster else {}
    return {"kind": "checkpoint", "version": version, "blocks": list(digests), **whose}


def best_of(records: Sequence[Record], evaluations: Mapping[int, float]) -> Record | None:
    """The checkpoint of the lowest held-out loss; of equal ones the first. `evaluations`: version → loss.

    `records` are in log order; one of a version that was collected again later is void, and the initial state
    is no checkpoint. None: no checkpoint is of a version that was evaluated.
    """
    last = {int(record["version"]): record for record in records}
    known = [version for version in last if version and version in evaluations]
    return last[min(known, key=evaluations.__getitem__)] if known else None


def thinned(records: Sequence[Record], most: int, newest: int, best: Record | None = None) -> list[Record]:
    """At most `most` of the checkpoints `records`, by version: the `newest` last ones, and older ones that
    are as evenly spread as possible. `best` stays beside them.
    """
    kept = list(records)
    while True:
        older = [at for at in range(len(kept) - newest) if kept[at] is not best]
        if len(older) + newest <= max(most, newest):
            return kept
        versions = [0, *(int(record["version"]) for record in kept)]
        del kept[min(older, key=lambda at: versions[at + 2] - versions[at])]
