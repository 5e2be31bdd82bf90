"""Encoding and decoding of bundles in the arena, with residuals of error feedback, and their fingerprints."""

from __future__ import annotations

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from hetpeer.stages.block.fingerprint import PLACES, fingerprint, pack
from hetpeer.stages.ipc import worker_messages as r
from hetpeer.stages.ipc.block_commands import Decode, Encode, ForgetResiduals, MarkBundle
from hetpeer.stages.links.codec import Codec, EncodedTensor, kept_of, length
from hetpeer.stages.links.tensor_codecs import decode, encode
from hetpeer.stages.worker.executor import Executor
from hetpeer.stages.worker.tensor_staging import CommandError, Staging


class Encoder(Executor):
    """Encodes bundles in the arena. Elements are chosen and rounded on the worker's device."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._residuals: dict[str, list[Tensor]] = {}
        super().__init__({Encode: self._encode, ForgetResiduals: self._forget_residuals})

    def _forget_residuals(self, _: ForgetResiduals) -> r.Done:
        self._residuals.clear()
        return r.Done()

    def _encode(self, command: Encode) -> r.Encoded:
        """Write the bundle's tensors one after the other.

        With a sparse codec `share` of each tensor's elements are kept, but no zeros. `feedback` names a
        residual: what the last bundle of that name left out is added, and what this one leaves out replaces
        it. Raises CommandError if `into` is too small, LocalError HP-NUM-002 if a value is beyond fp16.
        """
        codec, feedback = Codec.of(command.codec), command.feedback
        target = self._staging.raw(command.into)
        residuals = self._residuals.get(feedback, [])
        kept_back: list[Tensor] = []
        written: list[EncodedTensor] = []
        used = 0
        for number, (dtype, extent) in enumerate(command.tensors):
            flat = self._staging.flat(dtype, extent)
            if feedback or codec.changes(dtype):
                flat = self._staging.up(flat)
            if feedback and flat.is_floating_point():
                old = residuals[number] if number < len(residuals) else None
                flat = flat.float() if old is None or len(old) != len(flat) else flat.float() + old
            kept = kept_of(len(flat), command.share)
            if codec.sparse and flat.is_floating_point():
                kept = max(1, min(kept, int(torch.count_nonzero(flat))))
            try:
                one, nbytes = encode(codec, flat, kept, target[used:], squeeze=command.squeeze)
            except ValueError as error:  # raised by numpy and memoryview when there is no room
                raise CommandError(f"an extent of {len(target)} bytes is too small for a bundle") from error
            if feedback:
                kept_back.append(self._left_out(codec, one, target[used : used + nbytes], flat))
            written.append(one)
            used += nbytes
        if feedback:
            self._residuals[feedback] = kept_back
        return r.Encoded(nbytes=used, written=tuple(written))

    def _left_out(self, codec: Codec, written: EncodedTensor, data: memoryview, flat: Tensor) -> Tensor:
        if not flat.is_floating_point():
            return torch.empty(0)
        sent = torch.empty_like(flat, device="cpu")
        decode(codec, written, data, sent)
        return flat - self._staging.up(sent)


class Decoder(Executor):
    """Decodes bundles into the arena."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        super().__init__({Decode: self._decode, MarkBundle: self._mark})

    def _decode(self, command: Decode) -> r.Done:
        """Fill the bundle's tensors from what `Encoder` wrote; else raises ProtocolError or CommandError."""
        if len(command.written) != len(command.tensors):
            raise CommandError(
                f"{len(command.written)} encoded tensors for a bundle of {len(command.tensors)}"
            )
        codec, view, used = Codec.of(command.codec), self._staging.raw(command.data), 0
        for one, (dtype, extent) in zip(command.written, command.tensors, strict=True):
            target = self._staging.flat(dtype, extent)
            size = length(codec, dtype, len(target), one)
            decode(codec, one, view[used : used + size], target)
            used += size
        if used != len(view):
            raise CommandError(f"{len(view)} bytes of an encoded bundle, {used} of which mean something")
        return r.Done()

    def _mark(self, command: MarkBundle) -> r.BundleMarked:
        """Fingerprint of the float tensors of a bundle, digest of the others, and digest of all its bytes."""
        total, exact, whole = np.zeros(PLACES), blake3(), blake3()
        for number, (dtype, extent) in enumerate(command.tensors):
            data = self._staging.raw(extent)
            whole.update(data)
            flat = self._staging.flat(dtype, extent)
            if flat.is_floating_point():
                total += fingerprint(flat.float().numpy(), number, 0, command.key)
            else:
                exact.update(data)
        digests = [found.digest(r.DIGEST_BYTES) for found in (exact, whole)]
        return r.BundleMarked(marks=pack(total), exact=digests[0], digest=digests[1])
