"""Zip file for a person who helps: doctor's findings, the end of the log, installed packages.

It goes to others, so identifying data is removed: addresses, names of user and machine, folders, most of each
peer id. It is plain text, so that its owner can read it before giving it away.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import os
import re
import socket
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path

from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.checkup.findings import Finding, document
from hetpeer.peer.process.log_files import LogReader

MESSAGES = 2000
"""The last ones of the log."""
_INVITE = re.compile(r"hetpeer://[^\s\"'\\]+")
_PEER = re.compile(
    r"\b(?:Qm[1-9A-HJ-NP-Za-km-z]{38}|12D3KooW[1-9A-HJ-NP-Za-km-z]{38})([1-9A-HJ-NP-Za-km-z]{6})\b"
)
_NAMED = re.compile(r"(/dns[46]?/)[^/\s\"]+")
_NUMBERS = re.compile(
    r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\w|\.\d)"
    r"|(?<![\w.:])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:])"
)


def redacted(text: str, names: Mapping[str, str]) -> str:
    """`text` without invites, addresses and names; of a peer's id the last six characters stay. Pure.

    `names`: what is to be replaced by what as well, such as the home folder by `HOME`.
    """
    for name in sorted(names, key=len, reverse=True):  # a folder before the user whose name is in it
        inside = re.escape(name)
        text = re.sub(rf"(?<!\w){inside}(?!\w)", names[name], text)
    for pattern, instead in ((_INVITE, "INVITE"), (_PEER, r"…\1"), (_NAMED, r"\1NAME")):
        text = pattern.sub(instead, text)
    return _NUMBERS.sub(_address, text)


def _address(found: re.Match[str]) -> str:
    """The kind of an address; anything else, such as a time of day, stays."""
    try:
        address = ipaddress.ip_address(found[0])
    except ValueError:
        return found[0]
    if address.is_loopback or address.is_unspecified:
        return found[0]
    return "PRIVATE-ADDRESS" if address.is_private else "ADDRESS"


def write_bundle(path: Path, home: Path, findings: Sequence[Finding]) -> None:
    """Make the new file `path`, mode 0600.

    Raises `LocalError` HP-DISK-001 (also if it exists), HP-DISK-002; then nothing is left.
    """
    names = _own_names(home)
    parts = {
        "doctor.json": json.dumps(document(findings), indent=1),
        "log.jsonl": "".join(f"{raw}\n" for raw in _last_words(home)),
        "packages.txt": "".join(f"{package}\n" for package in _packages()),
    }
    with disk_errors(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with (
                os.fdopen(descriptor, "wb") as file,
                zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
            ):
                for name, text in parts.items():
                    archive.writestr(name, redacted(text, names))
        except OSError:
            path.unlink(missing_ok=True)
            raise


def _own_names(home: Path) -> dict[str, str]:
    """Identifying text → its replacement."""
    names = {
        str(home.absolute()): "HOME",
        str(home): "HOME",
        str(Path.home()): "~",
        socket.gethostname(): "HOST",
    }
    with suppress(OSError, KeyError):  # a user without a name
        names[getpass.getuser()] = "USER"
    written = {json.dumps(name)[1:-1]: instead for name, instead in names.items()}  # as the log has them
    return {name: instead for name, instead in (names | written).items() if len(name) > 1}


def _last_words(home: Path) -> list[str]:
    try:
        with closing(LogReader(home)) as reader:
            return [entry.raw for entry in reader.last(MESSAGES)]
    except LocalError:  # nobody has kept one
        return []


def _packages() -> Iterable[str]:
    found = {(one.metadata["Name"] or "?", one.version) for one in metadata.distributions()}
    return (f"{name} {version}" for name, version in sorted(found))
