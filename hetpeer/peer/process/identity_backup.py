"""Backup and restore of an identity's key."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hetpeer.bootstrap.run.durable_files import atomic_write, disk_errors, sync_folder
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.peer_identity import Identity, hold


def backup(key: Path, target: Path) -> Identity:
    """Copy the identity at `key` to the new file `target`, with mode 0600 from its first byte.

    Raises `LocalError` HP-ID-001 (no valid key), HP-ID-003 (`target` exists or cannot be written; then
    nothing is left there).
    """
    identity = Identity.load(key)
    content = key.read_bytes()
    # No link into place as for the key itself: memory sticks know none.
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _not_backed_up(target, error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        target.unlink(missing_ok=True)
        raise _not_backed_up(target, error) from error
    return identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Result of `restore`. `kept`: path of the old identity; `shared`: whether others can read the copy."""

    peer_id: str
    kept: Path | None
    shared: bool


def restore(copy: Path, key: Path, *, replace: bool) -> Restored:
    """Restore the identity in the file `copy` to `key`. With `replace`, another identity there is kept beside
    it.

    Raises `LocalError` HP-ID-001 (`copy` is damaged), HP-ID-002 (a process uses the identity at `key`),
    HP-ID-004 (another identity is there), HP-DISK-*. A key that was at `key` is never lost or damaged.
    """
    identity, shared = Identity.load_copy(copy)
    with disk_errors(key):
        key.parent.mkdir(parents=True, exist_ok=True)
    held = hold(key)
    try:
        there = _who_is_there(key)
        if there == identity.peer_id:
            return Restored(peer_id=identity.peer_id, kept=None, shared=shared)
        if there is not None and not replace:
            raise LocalError(
                "HP-ID-004",
                f"another identity is at {key}",
                why=there,
                fix="keep that one, or add --replace: it is then kept beside the new one",
                exit_code=ExitCode.IDENTITY,
            )
        kept = _set_aside(key) if there is not None else None
        atomic_write(key, copy.read_bytes(), mode=0o600)
        return Restored(peer_id=identity.peer_id, kept=kept, shared=shared)
    finally:
        os.close(held)


def _who_is_there(key: Path) -> str | None:
    """The peer id of the identity at `key`, or the fault of the file; None if nothing is there."""
    if not os.path.lexists(key):
        return None
    try:
        return Identity.load(key).peer_id
    except LocalError as error:
        return error.why


def _set_aside(key: Path) -> Path:
    """Give the file at `key` a second name, so far unused. Returns that name."""
    number, aside = 1, key.with_name(f"{key.name}.old")
    with disk_errors(aside):
        while True:
            try:
                os.link(key, aside, follow_symlinks=False)
            except FileExistsError:
                number += 1
                aside = key.with_name(f"{key.name}.old-{number}")
            else:
                sync_folder(aside.parent)
                return aside


def _not_backed_up(target: Path, error: OSError) -> LocalError:
    return LocalError(
        "HP-ID-003",
        f"cannot back up the identity to {target}",
        why=error.strerror or str(error),
        fix="name a new file, in a folder that you can write to",
        exit_code=ExitCode.IDENTITY,
    )
