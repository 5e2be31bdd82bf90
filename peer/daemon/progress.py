"""What a volunteer tells the person who started it."""

from __future__ import annotations

import asyncio
import time

from hetpeer.averaging.member import Member, Phase
from hetpeer.bootstrap.manifest import Manifest
from hetpeer.peer.console import EVERY_S, LOOK_S, say
from hetpeer.peer.training.volunteer import Volunteer

PATIENCE_S = 3.0
"""What takes longer is said."""
WORKING = frozenset({Phase.TRAINING, Phase.REDUCING, Phase.APPLYING})


class VolunteerProgress:
    """Lines of `hetpeer join`: what it does or waits for, when it changes; while it works, the step every few seconds."""

    def __init__(self, manifest: Manifest) -> None:
        self._steps = manifest.training.steps
        self._tokens = manifest.training.microbatch_size * manifest.data.tokens_per_sample
        self._unit = manifest.data.unit
        self._contributed = False
        self._place: tuple[int, int] | None = None
        self._told = ""
        self._told_at = 0.0
        self._step = -1
        self._step_since = 0.0

    async def show_forever(self, volunteer: Volunteer) -> None:
        """Look at `volunteer` twice a second and print what is new."""
        counted, since = 0, time.monotonic()
        resting_since = since
        while True:
            await asyncio.sleep(LOOK_S)
            now, figures = time.monotonic(), volunteer.figures
            if figures.microbatches and not self._contributed:
                self._contributed = True
                counted, since = figures.microbatches, now
                say("first microbatch done: you are contributing")
            if now - since >= EVERY_S:
                figures.tokens_per_second = (figures.microbatches - counted) * self._tokens / (now - since)
                counted, since = figures.microbatches, now
            if volunteer.member.place not in (None, self._place):
                self._place = volunteer.member.place  # it may be ready before we look
                self._tell(f"getting {_blocks(volunteer.member)} ready", now)
            if volunteer.session.is_up and volunteer.member.phase in WORKING:
                resting_since = now
                if now - self._told_at >= EVERY_S and self._contributed:
                    self._tell(self._step_line(volunteer), now)
            elif (line := _waiting_line(volunteer, now - resting_since)) and line != self._told:
                self._tell(line, now)

    def _tell(self, line: str, now: float) -> None:
        self._told, self._told_at = line, now
        say(line)

    def _step_line(self, volunteer: Volunteer) -> str:
        member, speed = volunteer.member, volunteer.figures.tokens_per_second
        loss = "" if member.loss is None else f"  loss {member.loss:.4f}"
        you = f"  you {speed:,.0f} {self._unit}/s" if speed else ""
        step, now = member.version or 0, time.monotonic()
        if step != self._step:
            self._step, self._step_since = step, now
        slow = now - self._step_since
        waiting = f"  in this step for {slow:.0f} s" if slow > EVERY_S else ""
        return f"step {step}/{self._steps}{loss}  {_blocks(member)}{you}{waiting}"


def _waiting_line(volunteer: Volunteer, rest_s: float) -> str:
    """What a volunteer that takes no part in a step does or waits for; nothing while that is about to change."""
    member = volunteer.member
    if not volunteer.session.is_up:
        return "waiting for the coordinator: it does not answer" if rest_s > PATIENCE_S else ""
    match member.phase:
        case Phase.PREPARING:
            return f"getting {_blocks(member)} ready"
        case Phase.SYNCING:
            return f"waiting for the state of {_blocks(member)}" if rest_s > PATIENCE_S else ""
        case Phase.READY:
            return "ready; waiting for other volunteers" if rest_s > PATIENCE_S else ""
        case _:
            return ""


def _blocks(member: Member) -> str:
    return "" if member.place is None else f"blocks {member.place[0]}-{member.place[1] - 1}"
