"""The plan of a run and the steps that came of it, for status and dashboards. Pure.

All of it follows from the log: `planned` has the plan, commits have the seconds of steps.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.log.moves import Count, Seconds, measured_step_s
from hetpeer.bootstrap.run.seat_plan import SeatPlan, in_record
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import unpack

MAX_BYTES: Final = 1 << 20


class PlanNews(BaseModel):
    """The last plan that was given to a run, and the measured step beside it."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    id: Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]*$")]
    plan: SeatPlan
    since: Count
    """Step at which it came into force, or at which volunteers moved to their places."""
    ended: Count | None = None
    """Step from which blocks are divided otherwise; None: it is in force."""
    measured_s: Seconds | None = None
    """Median of the newest steps; None before there are two full ones."""


def encode(history: History) -> bytes:
    """The news as msgpack; nil if no plan was given."""
    record = history.plan
    news = (
        None
        if record is None
        else PlanNews(
            id=record["id"],
            plan=in_record(record),
            since=history.plan_since,
            ended=history.plan_ended,
            measured_s=measured_step_s(history, history.plan_since),
        )
    )
    data: bytes = msgpack.packb(None if news is None else news.model_dump(mode="json"))
    return data


def decode(data: bytes | bytearray, peer: str) -> PlanNews | None:
    """The news in an answer of `peer`; None: there is no plan. Raises `ProtocolError` for anything else."""
    plain = unpack(data, "news of a plan", peer)
    try:
        return None if plain is None else PlanNews.model_validate(plain)
    except ValidationError as error:
        raise ProtocolError("news of a plan that are none", peer=peer) from error
