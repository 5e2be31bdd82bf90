"""Messages between owner and daemon, one JSON object a line, and the socket they meet at.

Neither side trusts the other's lines: they are bounded and checked, and a wrong one has one error
(HP-CTL-003).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hetpeer.dht.base.errors import ExitCode, HetpeerError, LocalError
from hetpeer.dht.base.untrusted import first_wrong

SCHEMA = "hetpeer.control/1"
SOCKET = "control.sock"
MAX_REQUEST = 4096
"""Bytes of a line."""
MAX_ANSWER = 1 << 16
LONGEST_PAUSE_S = 366 * 86400.0

Text = Annotated[str, Field(max_length=256)]
AddressText = Annotated[str, Field(max_length=1024)]


class ControlRequest(BaseModel):
    """An order or question of the owner."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    do: Literal["status", "pause", "resume", "finish", "stop", "set"]
    for_s: Annotated[float, Field(gt=0, le=LONGEST_PAUSE_S)] | None = None
    """Seconds of a pause; None: until `resume`."""

    key: Annotated[str, Field(max_length=64)] | None = None
    """The setting that is to be changed."""
    value: Annotated[str, Field(max_length=1024)] | None = None

    @model_validator(mode="after")
    def _only_set_has_key_and_value(self) -> Self:
        if any((part is None) == (self.do == "set") for part in (self.key, self.value)):
            raise ValueError("set takes key and value, and nothing else does")
        return self

    @model_validator(mode="after")
    def _only_a_pause_is_long(self) -> Self:
        if self.for_s is not None and self.do != "pause":
            raise ValueError(f"{self.do} takes no for_s")
        return self

    @classmethod
    def decode(cls, line: bytes) -> ControlRequest:
        """The request of a line. Raises `LocalError` HP-CTL-003."""
        try:
            return cls.model_validate_json(line)
        except ValidationError as error:
            raise not_understood(first_wrong(error)[1]) from error

    def encode(self) -> bytes:
        """The request as one line of JSON."""
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


class LinkStatus(BaseModel):
    """A link that something was sent on. `to` is the end of the peer's id, `way` how it is reached."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    to: Text
    way: Text = ""
    bytes_per_second: float


class VolunteerStatus(BaseModel):
    """Progress of a volunteer in its run. `unit` is the unit of its samples."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    pid: int
    run: Text
    unit: Text
    steps: int
    step: int = 0
    """Committed steps; this and the fields below have defaults while no volunteer is at work."""
    loss: float | None = None
    blocks: tuple[int, int] | None = None
    """Blocks [begin, end) of the place."""
    units_per_second: float = 0.0
    microbatches: int = 0
    computes: float = 0.0
    """The share of its time in which its worker computes."""
    memory: Text = ""
    """Its offer to a place, and where the optimizer of its place is, in words."""
    lines: Annotated[tuple[LinkStatus, ...], Field(max_length=16)] = ()


class ReliableMember(BaseModel):
    """A reliable peer, as the answering reliable peer knows it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    peer: Text
    lacks: int | None = None
    """Records of the log; None: only who leads knows."""
    silent_s: float | None = None
    """Seconds since it was last heard; None: the peer that answers does not know."""


class ReliableStatus(BaseModel):
    """Progress of a reliable peer. `steps`: of the run; `version`: committed, as far as it knows."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    pid: int
    run: Text
    peer: Text
    """Id of the reliable peer itself."""
    leader: Text = ""
    """Id of the coordinator; empty: none is known."""
    term: int
    records: int
    """Records of its log."""
    version: int
    steps: int
    stored: int
    """The version of the newest checkpoint on its disk."""
    members: Annotated[tuple[ReliableMember, ...], Field(max_length=16, strict=False)] = ()


class SettingInForce(BaseModel):
    """A setting in force (docs/limits.md), as people write it, and its source."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    value: AddressText
    source: AddressText


class DaemonStatus(BaseModel):
    """State of a daemon (docs/daemon.md). Times are in seconds since 1970."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    state: Text
    reason: Text = ""
    why: Annotated[str, Field(max_length=4096)] = ""
    """The reason of a pause in words, with the settings that decide and when it ends. Of a reliable peer: why
    it cannot save something.
    """
    since: float
    """Start of this state for this reason."""
    until: float | None = None
    """Time at which its pause ends by itself."""
    ends: float | None = None
    """Time at which it leaves by itself (`join --for`)."""
    month_bytes: int | None = None
    """Sent and received in this month of the calendar."""
    addresses: Annotated[tuple[AddressText, ...], Field(max_length=16, strict=False)] = ()
    """Addresses of its node; none before it has joined the network."""
    settings: Annotated[dict[Text, SettingInForce], Field(max_length=64)] = {}
    """Settings in force, by `section.key`."""
    figures: VolunteerStatus | None = None
    """Progress, if it is a volunteer."""
    reliable: ReliableStatus | None = None
    """Progress, if it is a reliable peer."""
    dashboard: AddressText | None = None
    """The link to its page, with the token, if it serves one."""

    def encode(self) -> bytes:
        """The status as one line of JSON."""
        return _line(self.model_dump(mode="json"))


def encode_error(error: HetpeerError) -> bytes:
    """The answer for an error, as one line."""
    said = {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix}
    return _line({"error": {**said, "exit": int(error.exit_code)}})


def decode_answer(line: bytes) -> DaemonStatus:
    """Status in a daemon's answer. Raises an error in it as `LocalError`, HP-CTL-003 for anything else."""
    try:
        answer = json.loads(line)
        if "error" in answer:
            code, what, why, fix = (str(answer["error"][key])[:500] for key in ("code", "what", "why", "fix"))
            said = answer["error"].get("exit")  # nothing, of an older daemon
            status = next((one for one in ExitCode if one == said), ExitCode.UNEXPECTED)
            raise LocalError(code, what, why=why, fix=fix, exit_code=status)
        return DaemonStatus.model_validate_json(line)
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # ValidationError is a ValueError
        raise not_understood("the daemon's answer is none; it may be of another version") from error


def not_understood(why: str) -> LocalError:
    """HP-CTL-003."""
    return LocalError(
        "HP-CTL-003",
        "the daemon and this command do not understand each other",
        why=why,
        fix="use the same version of hetpeer for both: restart the daemon after an update",
        exit_code=ExitCode.USAGE,
    )


@contextmanager
def opened(home: Path) -> Iterator[tuple[int, str]]:
    """The opened folder, and a socket address in it that is short enough for any path. Raises OSError."""
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder, f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps({"schema": SCHEMA, **fields}).encode() + b"\n"
