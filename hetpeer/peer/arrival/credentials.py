"""Credentials for admission to a run (docs/admission.md): the voucher of an invite, and a proof of work.

Both are kept in the home beside the run's files: an invite is needed once, and the work is done once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.admission.admission import Admission
from hetpeer.bootstrap.admission.proof_of_work import MAX_NONCE_BYTES, find_proof, is_proof
from hetpeer.bootstrap.run.durable_files import atomic_write
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.vouchers import VOUCHER
from hetpeer.dht.base.runtime import aside
from hetpeer.peer.process.console import say


@dataclass(frozen=True, slots=True)
class Credentials:
    """Empty where the run asks for none, or there is none."""

    voucher: bytes = b""
    work: bytes = b""


async def credentials(run: RunDirectory, peer: str, voucher: bytes) -> Credentials:
    """Credentials of `peer` in `run`; `voucher`: of the present invite, if any. Raises `LocalError`
    HP-DISK-*.

    The proof of work is done in a thread that neither a cancellation nor the end of the process waits for.
    """
    settings = run.manifest.admission
    kept = run.path / "voucher"
    if voucher:
        atomic_write(kept, voucher, mode=0o600)
    bits, work = settings.work_bits, b""
    if bits:
        work = await aside(lambda: _proof(run, peer, bits), name="proof of work")
    return Credentials(voucher or _read(kept, VOUCHER.max_bytes), work)


def refusal(run: RunDirectory, peer: str, voucher: bytes) -> m.Rejected | None:
    """Reason for which every coordinator refuses `peer`, as far as the amendment decides; `voucher` as in
    `credentials`.

    Only the log knows earlier admissions, so an expired invite may still do. Proofs of work are not checked
    here.
    """
    manifest = run.manifest
    settings = manifest.admission.model_copy(update={"work_bits": 0, "per_network": 0})
    door = Admission(run.run_id, manifest.owner, settings)
    if run.signed.amendment is not None:
        door.amended(run.signed.amendment.amendment)
    shown = voucher or _read(run.path / "voucher", VOUCHER.max_bytes)
    judged = door.judge(peer, m.Hello(run=run.run_id, incarnation=0, voucher=shown), 0.0, "", ())
    return judged if isinstance(judged, m.Rejected) else None


def _proof(run: RunDirectory, peer: str, bits: int) -> bytes:
    path = run.path / "work"
    nonce = _read(path, MAX_NONCE_BYTES)
    if not is_proof(nonce, run.run_id, peer, bits):
        say(f"working for the proof of {bits} bits that the run asks for")
        nonce = find_proof(run.run_id, peer, bits)
        atomic_write(path, nonce, mode=0o600)
    return nonce


def _read(path: Path, limit: int) -> bytes:
    """Content of the file; empty if it is missing, too long or unreadable."""
    try:
        data = path.read_bytes()
    except OSError:
        return b""
    return data if len(data) <= limit else b""
