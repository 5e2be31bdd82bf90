"""A link: what carries tensors to one other volunteer, over a few streams at once.

One stream does not fill a long or a fast line: it waits for windows to open, and for its own frames to be read one by
one. A second and a third lane are opened when the ones before have something under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from hetpeer.dht.channel import Channel, Parcel, Receiver, dial
from hetpeer.dht.errors import PeerLostError
from hetpeer.dht.node import Node
from hetpeer.dht.tasks import TaskSet

TENSORS: Final = "hetpeer/1/tensors"
LANES = 3
GRACE_S = 1.5
"""A link may be away for so long before its tasks are sent elsewhere (a restart of p2pd)."""

_log = logging.getLogger(__name__)


class Link:
    """The way to `peer_id`. `changed(is_up)` is told when it has been down for longer than the grace, and when it is back;
    `lost` when the peer does not know us any more: what was under way is void, and the link is closed.
    """

    def __init__(
        self,
        node: Node,
        peer_id: str,
        key: str,
        tasks: TaskSet,
        receiver: Receiver,
        changed: Callable[[bool], None],
        lost: Callable[[], None],
    ) -> None:
        self.peer_id = peer_id
        self.closed = False
        self._node = node
        self._key = key
        self._tasks = tasks
        self._receiver = receiver
        self._changed = changed
        self._lost = lost
        self._lanes: list[Channel] = []
        tasks.spawn(self._watch(), name=f"link to {peer_id}")

    def __repr__(self) -> str:
        return f"<Link to {self.peer_id[-6:]}, {self._lanes}>"

    @property
    def is_up(self) -> bool:
        """Whether a stream is open."""
        return any(lane.is_up for lane in self._lanes)

    def send(self, parcel: Parcel) -> None:
        """Queue a frame on the lane that has least under way. Frames of different lanes may overtake each other."""
        idle = min(self._lanes, key=_under_way, default=None)
        if idle is None or (len(idle.outbox) and len(self._lanes) < LANES):
            idle = self._open()
        idle.send(parcel)

    def forget(self, tag: object) -> None:
        """Frames tagged so need not arrive any more."""
        for lane in self._lanes:
            lane.outbox.forget(tag)

    def close(self) -> None:
        """End it; frames that have not arrived are dropped."""
        self.closed = True
        for lane in self._lanes:
            lane.close()

    def _open(self) -> Channel:
        lane = Channel(self.peer_id, self._key, self._receiver, payload_limit=0, lane=len(self._lanes))
        self._lanes.append(lane)
        self._tasks.spawn(self._keep_dialling(lane), name=f"tensors to {self.peer_id}, lane {lane.lane}")
        return lane

    async def _keep_dialling(self, lane: Channel) -> None:
        try:
            await dial(self._node, TENSORS, lane)
        except PeerLostError as error:
            _log.debug("%r: %s", lane, error)
            if not self.closed:
                self.close()
                self._lost()

    async def _watch(self) -> None:
        told_down = False
        while not self.closed:
            await asyncio.sleep(GRACE_S / 3)
            if self.is_up:
                if told_down:
                    told_down = False
                    self._changed(True)
            elif not told_down and not await self._comes_back():
                told_down = True
                self._changed(False)

    async def _comes_back(self) -> bool:
        deadline = asyncio.get_running_loop().time() + GRACE_S
        while asyncio.get_running_loop().time() < deadline and not self.closed:
            if self.is_up:
                return True
            await asyncio.sleep(GRACE_S / 10)
        return self.is_up or self.closed


def _under_way(lane: Channel) -> int:
    """Bytes that are not acknowledged."""
    return sum(len(part) for _, parcel in lane.outbox for part in parcel.payload)
