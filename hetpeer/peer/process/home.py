"""Files of a peer that outlive its process: identity, incarnations, fetched files of runs, its own event log.

`HETPEER_HOME` puts everything in one place (containers, tests); otherwise the XDG state directory is used.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from hetpeer.bootstrap.run.durable_files import atomic_write, disk_errors
from hetpeer.bootstrap.run.manifest import SignedManifest
from hetpeer.bootstrap.run.run_directory import FOLDERS, RunDirectory
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.process.span_trace import SUFFIX


def default_home() -> Path:
    """`$HETPEER_HOME`, else `$XDG_STATE_HOME/hetpeer`, else `~/.local/state/hetpeer`."""
    if home := os.environ.get("HETPEER_HOME"):
        return Path(home)
    return state_home()


def state_home() -> Path:
    """The default home without HETPEER_HOME."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "hetpeer"


@dataclass(frozen=True, slots=True)
class Home:
    """One peer's directory. One process at a time may use its identity (HP-ID-002)."""

    path: Path

    @property
    def key(self) -> Path:
        """The key of this machine as a volunteer."""
        return self.path / "identity.key"

    @property
    def reliable_key(self) -> Path:
        """The key of this machine as a reliable peer: a volunteer may run beside it."""
        return self.path / "reliable.key"

    def reliable_mark(self, run_id: str, peer_id: str) -> Path:
        """Says in which directory this machine, as the reliable peer `peer_id`, got its copy of a run."""
        return self.path / "reliable" / peer_id / run_id

    @property
    def rendezvous_key(self) -> Path:
        """The key of this machine as a rendezvous: peers of any kind may run beside it."""
        return self.path / "rendezvous.key"

    @property
    def rendezvous(self) -> Path:
        """Folder with the control socket and the log of a rendezvous."""
        return self.path / "rendezvous"

    def identity(self) -> Identity:
        """The identity of this peer, made at the first call. Raises `LocalError` HP-DISK-001, HP-ID-001."""
        return self._identity(self.key)

    def reliable_identity(self) -> Identity:
        """Identity of `reliable_key`, made at the first call; raises as `identity`."""
        return self._identity(self.reliable_key)

    def rendezvous_identity(self) -> Identity:
        """Identity of `rendezvous_key`, made at the first call; raises as `identity`."""
        return self._identity(self.rendezvous_key)

    def _identity(self, key: Path) -> Identity:
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        return Identity.load_or_create(key)

    def next_incarnation(self) -> int:
        """A number higher than all that this peer ever used; durable before it is returned.

        Not below the clock's seconds: an identity that was restored in an empty home has been used elsewhere.
        """
        path = self.path / "incarnation"
        try:
            last = int(path.read_text())
        except (OSError, ValueError):
            last = 0
        following = max(last + 1, int(time.time()))
        atomic_write(path, str(following).encode())
        return following

    def run(self, signed: SignedManifest) -> RunDirectory:
        """The directory of a run's files, which fills as they are fetched."""
        directory = self.path / "runs" / signed.run_id
        with disk_errors(directory):
            for folder in FOLDERS:
                (directory / folder).mkdir(parents=True, exist_ok=True)
        atomic_write(directory / "manifest.hetpeer", signed.data)
        return RunDirectory(directory, signed)

    def events_path(self, run: RunDirectory) -> Path:
        return run.path / "events.jsonl"

    def trace_path(self, run: RunDirectory, process: int) -> Path:
        """Path of one process's trace of `run`."""
        return run.path / "traces" / f"{process}{SUFFIX}"
