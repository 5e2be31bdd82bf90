"""Errors: what went wrong, whose fault it is, and how the process ends.

Every error that a person may see carries a stable code (`HP-NET-002`), what happened, why, and what to do.
The command line prints `line()` and exits with `exit_code`. docs/errors.md has a section for each code.
`LocalError` is ours or the user's to mend and ends the process. `RemoteError` is one peer's fault: it never
stops us. Peers choose some of the words that a terminal shows: `escaped` keeps them from moving the cursor.
"""

from __future__ import annotations

import enum
import re

MAX_SAID = 500
"""Characters of a peer's text that an error repeats, so that a megabyte of it does not fill the log."""
_PEER = re.compile(r"\b(?:Qm[1-9A-HJ-NP-Za-km-z]{44}|12D3KooW[1-9A-HJ-NP-Za-km-z]{44})\b")
SHORT_ID = 6
"""Characters of a peer's id in its short form."""


class ExitCode(enum.IntEnum):
    """Exit statuses of the command line, stable across versions."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    CONFIG = 3
    NO_DEVICE = 4
    NETWORK = 5
    IDENTITY = 7
    VERSION = 8
    NOT_RUNNING = 9
    TOO_SMALL = 10
    RUN_CLOSED = 11
    TRY_LATER = 75
    INTERRUPTED = 130
    TERMINATED = 143


class HetpeerError(Exception):
    """Base of all errors of the project.

    `what` happened, `why` it likely did, one `fix`: each a clause without a final full stop; none is empty.
    """

    def __init__(
        self,
        code: str,
        what: str,
        *,
        why: str,
        fix: str,
        exit_code: ExitCode = ExitCode.UNEXPECTED,
    ) -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.why = why
        self.fix = fix
        self.exit_code = exit_code

    def line(self) -> str:
        """Line for people: what, why, what to do. Control characters are escaped: peers choose some words."""
        return escaped(f"{self.code}: {self.what}; why: {self.why}; do: {self.fix}".replace("\n", " "))

    def __str__(self) -> str:
        return self.line()


class LocalError(HetpeerError):
    """A fault of this machine or of what its user asked for. The process ends with `exit_code`."""


class RemoteError(HetpeerError):
    """A fault of another peer; `peer` is its id where known."""

    def __init__(self, code: str, what: str, *, peer: str = "", why: str, fix: str) -> None:
        super().__init__(code, what, why=why, fix=fix, exit_code=ExitCode.NETWORK)
        self.peer = peer


class ProtocolError(RemoteError):
    """A peer sent what the schema forbids; `detail` says what, in one clause. Decoders raise nothing else."""

    def __init__(self, what: str, *, peer: str = "", why: str = "") -> None:
        what, why = _cut(what), _cut(why)
        super().__init__(
            "HP-WIRE-001",
            what,
            peer=peer,
            why=why or "its sender is of another version, broken or dishonest",
            fix="update both peers to the same version",
        )
        self.detail = f"{what}: {why}" if why else what


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SAID else f"{text[:MAX_SAID]}…"


class PeerLostError(RemoteError):
    """A stream to a peer broke or could not be opened."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(
            "HP-NET-010",
            f"lost peer {peer}",
            peer=peer,
            why=why,
            fix="see whether it runs, and whether the connection between holds",
        )


def short_id(peer: str) -> str:
    """The short form of a peer's id for people, everywhere the same: `…x9fQ2a`. The end of an id will do."""
    return f"…{peer[-SHORT_ID:]}"


def short_ids(text: str) -> str:
    """`text` with every peer id in its short form."""
    return _PEER.sub(lambda found: short_id(found[0]), text)


def escaped(text: str) -> str:
    r"""`text` with escapes such as `\x1b` for control characters, line ends and direction marks."""
    if text.isprintable():
        return text
    return "".join(
        mark if mark.isprintable() else mark.encode("unicode_escape", "surrogatepass").decode()
        for mark in text
    )
