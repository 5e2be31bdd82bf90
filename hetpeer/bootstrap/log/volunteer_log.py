"""Lines of volunteers' signed logs, one JSON object per event: the evidence that `hetpeer audit` counts.

A line is {"record", "key", "signature"}: the signature of the writer's peer key over the record's canonical
msgpack.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.bootstrap.run.owner_signature import pack
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.identity.peer_identity import Identity, peer_id_of, verify

DOMAIN = b"hetpeer event\0"
"""Prefix of the signed bytes, so that a signature on an event is valid for nothing else."""
MAX_LINE_BYTES = 2**20
TAIL_BYTES = 2**23
"""Bytes at the end of a file that are searched for its last line."""

Record = dict[str, Any]


def keep_event(path: Path, line: str) -> None:
    """Add a peer's line after cutting off a torn one. Raises `LocalError` HP-DISK-002, the file unchanged."""
    with disk_errors(path), path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
            end = file.seek(0, os.SEEK_END)
        data = line.encode() + b"\n"
        if file.write(data) != len(data):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sign_event(record: Record, identity: Identity) -> str:
    """Signed line for a record, without the newline."""
    fields = {
        "record": record,
        "key": base64.b64encode(identity.public_bytes).decode(),
        "signature": base64.b64encode(identity.sign(DOMAIN + pack(record))).decode(),
    }
    return json.dumps(fields, separators=(",", ":"), allow_nan=False)


def read_event(line: str) -> tuple[str, Record]:
    """(peer id of the signer, record) of a line. Raises `ProtocolError` unless the signature is valid."""
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"an event of {len(line)} characters")
    try:
        fields = json.loads(line)
        record, key, signature = fields["record"], fields["key"], fields["signature"]
        public_bytes = base64.b64decode(key, validate=True)
        signed = verify(public_bytes, DOMAIN + pack(record), base64.b64decode(signature, validate=True))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, binascii.Error) as error:
        raise ProtocolError("a line is not a signed event", why=str(error)) from error
    if not signed or not isinstance(record, dict):
        raise ProtocolError("an event's signature does not fit what it says")
    return peer_id_of(public_bytes), record


def read_events(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) of every complete line; a torn last line is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield number, line.decode(errors="replace")


def last_event(path: Path, peer: str) -> str:
    """Last complete line in `path` that `peer` signed, or an empty text."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        with contextlib.suppress(ProtocolError):
            text = line.decode(errors="replace")
            if read_event(text)[0] == peer:
                return text
    return ""
