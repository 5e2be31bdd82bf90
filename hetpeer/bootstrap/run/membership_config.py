"""Membership config: the reliable peers of a run, by its manifest or the latest amendment known here."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hetpeer.bootstrap.run.amendment import Amendment, MembershipChange, sign_amendment
from hetpeer.bootstrap.run.durable_files import atomic_write
from hetpeer.bootstrap.run.manifest import SignedManifest, validated
from hetpeer.dht.base.errors import LocalError, ProtocolError

FILE: Final = "amendment.hetpeer"

_log = logging.getLogger(__name__)


class MembershipConfig:
    """The reliable peers of the run in `signed`, now and after each amendment.

    The latest is kept in `folder`, so no peer returns to an earlier one. Raises HP-RUN-013, HP-DISK-*.
    """

    def __init__(self, signed: SignedManifest, folder: Path) -> None:
        self._signed = signed
        self._path = folder / FILE
        self._changed_ns = 0
        self.look()
        if self.data and not self._path.exists():
            atomic_write(self._path, self.data)

    @property
    def peers(self) -> tuple[str, ...]:
        """Ids of the reliable peers."""
        return self._signed.reliable

    @property
    def sequence(self) -> int:
        """Number of the amendment in force; 0: the manifest alone."""
        return self._signed.sequence

    @property
    def data(self) -> bytes:
        """Bytes of the amendment in force; empty if there is none."""
        return self._signed.amendment.data if self._signed.amendment is not None else b""

    @property
    def amendment(self) -> Amendment | None:
        """The amendment in force, if any."""
        return self._signed.amendment.amendment if self._signed.amendment is not None else None

    def look(self) -> None:
        """Read the file again if `hetpeer amend` has written it since. Raises `LocalError` HP-RUN-013."""
        try:
            changed_ns = self._path.stat().st_mtime_ns
            data = self._path.read_bytes() if changed_ns != self._changed_ns else b""
        except OSError:
            return
        self._changed_ns = changed_ns
        if data:
            self._take(self._signed.amended(data), kept=True)

    def learn(self, data: bytes, *, instead: bool = False) -> bool:
        """Take and store the amendment in `data` if it is later. Returns whether it was taken.

        With `instead`, one of the same number too: the log's first counts. Raises HP-RUN-013, HP-DISK-*.
        """
        return self._take(self._signed.amended(data, instead=instead), kept=False)

    def hear(self, data: bytes, peer: str, *, instead: bool = False) -> bool:
        """`learn` from `peer`. Raises `ProtocolError` if the owner did not sign, `LocalError` HP-DISK-*."""
        try:
            amended = self._signed.amended(data, instead=instead)
        except LocalError as error:
            raise ProtocolError("an amendment that the owner has not signed", peer=peer) from error
        return self._take(amended, kept=False)

    def _take(self, signed: SignedManifest, *, kept: bool) -> bool:
        if signed is self._signed:
            return False
        if not kept and signed.amendment is not None:
            atomic_write(self._path, signed.amendment.data)
        self._signed = signed
        _log.warning("amendment %d: the reliable peers are %s", self.sequence, ", ".join(self.peers))
        return True


def amend(
    signed: SignedManifest, folder: Path, owner_key: Ed25519PrivateKey, change: MembershipChange
) -> MembershipConfig:
    """Sign another amendment of the run in `folder`. Raises HP-RUN-001, HP-RUN-013, HP-DISK-*."""
    config = MembershipConfig(signed, folder)
    changed = change.fields(config.amendment, config.peers)
    fields = {"run_id": signed.run_id, "sequence": config.sequence + 1, **changed}
    config.learn(sign_amendment(validated(Amendment, fields), owner_key))
    return config
