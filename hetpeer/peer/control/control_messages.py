"""What owner and daemon say to each other, one JSON object a line, and where they meet.

Neither trusts the other's lines: they are bounded and checked, and what is wrong has one error.
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

SCHEMA = "hetpeer.control/1"
SOCKET = "control.sock"
MAX_REQUEST = 4096
"""Bytes of a line."""
MAX_ANSWER = 1 << 16
LONGEST_PAUSE_S = 366 * 86400.0

Text = Annotated[str, Field(max_length=256)]
AddressText = Annotated[str, Field(max_length=1024)]


class ControlRequest(BaseModel):
    """What the owner wants."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    do: Literal["status", "pause", "resume", "finish", "stop", "set"]
    for_s: Annotated[float, Field(gt=0, le=LONGEST_PAUSE_S)] | None = None
    """How long a pause is to be; None: until `resume`."""

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
            raise not_understood(error.errors(include_url=False)[0]["msg"]) from error

    def encode(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


class LinkStatus(BaseModel):
    """A link that something was sent on. `to` is the end of the peer's id, `way` how it is reached."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    to: Text
    way: Text = ""
    bytes_per_second: float


class VolunteerStatus(BaseModel):
    """What the daemon has to show, once it knows its run. `unit` is what its samples are counted in."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    pid: int
    run: Text
    unit: Text
    steps: int
    step: int = 0
    """Of a volunteer that is at work, as the rest."""
    loss: float | None = None
    blocks: tuple[int, int] | None = None
    """From the first until before the second."""
    units_per_second: float = 0.0
    microbatches: int = 0
    computes: float = 0.0
    """The share of its time in which its worker computes."""
    lines: Annotated[tuple[LinkStatus, ...], Field(max_length=16)] = ()


class ReliableMember(BaseModel):
    """A reliable peer, as far as the one that answers knows it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    peer: Text
    lacks: int | None = None
    """Records of the log; None: only who leads knows."""
    silent_s: float | None = None
    """Since it was last heard; None: nothing is to be heard of it there."""


class ReliableStatus(BaseModel):
    """What a reliable peer has to show. `steps` are those of the run, `version` those that are committed, as far as it knows."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    pid: int
    run: Text
    peer: Text
    """Its own id."""
    leader: Text = ""
    """Who coordinates; empty: nobody, as far as it knows."""
    term: int
    records: int
    """Of its log."""
    version: int
    steps: int
    stored: int
    """The version of the newest checkpoint on its disk."""
    members: Annotated[tuple[ReliableMember, ...], Field(max_length=16, strict=False)] = ()


class SettingInForce(BaseModel):
    """One of docs/limits.md that is in force, as people write it, and where it is from."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    value: AddressText
    source: AddressText


class DaemonStatus(BaseModel):
    """What the daemon does (docs/daemon.md). Times are in seconds since 1970."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    state: Text
    reason: Text = ""
    why: Annotated[str, Field(max_length=4096)] = ""
    """Of a pause: the same in words, with the settings that say so and when it goes on."""
    since: float
    """When it began to be in this state for this reason."""
    until: float | None = None
    """When its pause ends by itself."""
    ends: float | None = None
    """When it finishes by itself (`join --for`)."""
    month_bytes: int | None = None
    """Sent and received in this month of the calendar."""
    addresses: Annotated[tuple[AddressText, ...], Field(max_length=16, strict=False)] = ()
    """Where its node is reached; none before it has joined the network."""
    settings: Annotated[dict[Text, SettingInForce], Field(max_length=64)] = {}
    """In force, by `section.key`."""
    figures: VolunteerStatus | None = None
    """Of a volunteer."""
    reliable: ReliableStatus | None = None
    """Of a reliable peer."""
    dashboard: AddressText | None = None
    """The link to its page, with the token, if it serves one."""

    def encode(self) -> bytes:
        return _line(self.model_dump(mode="json"))


def encode_error(error: HetpeerError) -> bytes:
    """The answer that says what is wrong."""
    said = {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix}
    return _line({"error": {**said, "exit": int(error.exit_code)}})


def decode_answer(line: bytes) -> DaemonStatus:
    """The standing in a daemon's answer. Raises the error in it as `LocalError`, and HP-CTL-003 for anything else."""
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
    """The opened folder, and the socket's address relative to it: a path may be longer than an address. Raises OSError."""
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder, f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps({"schema": SCHEMA, **fields}).encode() + b"\n"
