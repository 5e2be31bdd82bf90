"""What a hostile volunteer does otherwise than an honest one: the daemon's own functions, changed from
outside, as a changed program would have them.

    python -m tests.hostile.behaviour join …

It is an honest volunteer but for the attack that is under way (attacks.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import zstandard

from tests.hostile.attacks import LOOK_S, UnderWay

NAN = b"\x00\x00\xc0\x7f"
"""As float32, and as the second of two bf16 scales."""
KEPT = 300
"""Messages that are remembered, to be said again."""
FAR = 1_000_000
"""An id that no step has."""
LINES = 40
"""Lines of false evidence beside each slot that is reported."""
BOMB = zstandard.ZstdCompressor().compress(bytes(256 << 20))


def install(attack: Callable[[], str]) -> None:
    """Change this process; `attack` says what it does now."""
    _send_otherwise(attack)
    _sit_on_work(attack)
    _say_otherwise(attack)


def _send_otherwise(attack: Callable[[], str]) -> None:
    from hetpeer.peer.transport.tensor_store import TensorStore

    depart = TensorStore.depart

    def departing(store: Any, tensor: Any, parcel: Any) -> Any:
        parcel = depart(store, tensor, parcel)
        if parcel is None:
            return None
        payload, is_bundle = bytes(parcel.payload[0]), parcel.header["kind"] in ("activation", "gradient")
        match attack():
            case "nan" if is_bundle:
                wrong = NAN + payload[4:]
            case "nan in a sum" if parcel.header["kind"] == "part":
                wrong = NAN + payload[4:]
            case "huge" if is_bundle:
                wrong = payload + bytes(1 << 20)
            case "bomb" if is_bundle:
                cut = len(payload) // 2
                wrong = (payload[:cut] + BOMB + payload)[: len(payload)]
            case _:
                return parcel
        return dataclasses.replace(parcel, payload=(wrong,))

    TensorStore.depart = departing


def _sit_on_work(attack: Callable[[], str]) -> None:
    from hetpeer.peer.training.task_execution import TaskExecution

    forward = TaskExecution.forward

    async def never(doing: str) -> None:
        while attack() == doing:
            await asyncio.sleep(LOOK_S)

    def sits(self: Any, step: Any, work: Any) -> Any:
        return never("hoard") if attack() == "hoard" else forward(self, step, work)

    TaskExecution.forward = sits  # type: ignore[method-assign]


def _say_otherwise(attack: Callable[[], str]) -> None:
    from hetpeer.averaging import messages as m
    from hetpeer.bootstrap.log.volunteer_log import sign_event
    from hetpeer.peer.training.control_session import ControlSession

    tell, said, runs = ControlSession.tell, list[Any](), list[str]()
    choose = random.Random(0)

    def boast(self: Any, number: int) -> Any:
        """A signed line of a kind that is none, or about a step that nobody was in."""
        identity, kind = self._node.identity, ("boast", "leftover")[number % 2]
        about = {"kind": kind, "run": runs[-1], "peer": identity.peer_id, "view": 0, "step": FAR + number}
        more = {"border": 0, "sender": identity.peer_id, "ids": list(range(400))}
        return m.EventLine(line=sign_event(about | more, identity))

    def tells(self: Any, message: Any) -> None:
        if isinstance(message, m.Hello):
            runs.append(message.run)
        if attack() == "evidence" and isinstance(message, m.Sealed):
            for number in range(LINES):
                tell(self, boast(self, number))
        if attack() == "reports" and isinstance(message, m.Sealed) and message.contents:
            first, *others = message.contents
            first = first.model_copy(update={"ids": (*first.ids, FAR)})
            message = message.model_copy(update={"contents": (first, *others)})
        tell(self, message)
        said.append(message)
        del said[:-KEPT]
        if attack() == "replay" and not isinstance(message, m.Hello):
            for old in choose.sample(said, min(3, len(said))):
                if not isinstance(old, m.Hello | m.Farewell | m.EventLine):
                    tell(self, old)

    ControlSession.tell = tells  # type: ignore[method-assign]


if __name__ == "__main__":
    from hetpeer.peer.cli.main import run

    install(UnderWay.told())
    run()
