"""The place that a volunteer holds, as shared by everything that carries out a step's effects there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetpeer.averaging.member.member import Effect, Member
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.peer.preparation.data_source import DataSource
from hetpeer.peer.transport.link_book import LinkBook
from hetpeer.peer.transport.tensor_schema import TensorSchema
from hetpeer.peer.transport.worker_posts import WorkerPosts
from hetpeer.stages.pipeline.schedule_1f1b import InFlightWindow


@dataclass(frozen=True, slots=True)
class HeldPlace:
    """The worker's side of one place; a new one is made for each `Prepare`."""

    me: str
    """Our peer id."""
    member: Member
    posts: WorkerPosts
    schema: TensorSchema
    book: LinkBook
    window: InFlightWindow
    """Measures and limits microbatches in flight."""
    data: DataSource | None
    """The author's inputs; None if no block of the place uses any."""
    tasks: TaskSet
    perform: Callable[[Sequence[Effect]], None]
    """Carries out effects of the core."""
    offended: Callable[[str, ProtocolError], None]
    """Counts an offence of a peer."""
