"""Progress of a volunteer for its owner: lines in the terminal, and figures for `hetpeer status`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hetpeer.averaging.member.member import Member
from hetpeer.averaging.member.member_life import Phase
from hetpeer.averaging.member.work_in_progress import WorkerOccupation
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.peer.control.control_messages import LinkStatus, VolunteerStatus
from hetpeer.peer.limits.amounts import blocks_text, bytes_text, counted
from hetpeer.peer.process.console import EVERY_S, LOOK_S, say
from hetpeer.peer.training.early_placement import state_bytes
from hetpeer.peer.training.self_advert import link_notes
from hetpeer.peer.training.volunteer import Volunteer
from hetpeer.peer.training.volunteer_figures import memory_text, offload_text

if TYPE_CHECKING:
    from hetpeer.peer.daemon.presence import Presence

SHOWN_AFTER_S = 3.0
"""Seconds after which a wait is shown."""
WORTH_TELLING = 1 << 20
"""Bytes: a state of which so much more has come is on its way."""
STALLED_S = 2 * EVERY_S
"""Seconds without more bytes after which a state counts as awaited."""
WORKING = frozenset({Phase.TRAINING, Phase.REDUCING, Phase.APPLYING})


class Arriving:
    """Progress of a state that is being fetched. Pure; times in seconds."""

    def __init__(self) -> None:
        self._before: int | None = None
        """Bytes that the node had received when the fetch began."""
        self._seen = 0
        self._seen_at = 0.0

    def look(self, received: int, fetching: bool, now: float) -> int | None:
        """Bytes fetched so far; None if they are few or have stalled. `received`: all bytes of the node."""
        if not fetching:
            self._before = None
            return None
        if self._before is None:
            self._before = self._seen = received
        if received - self._seen >= WORTH_TELLING:
            self._seen, self._seen_at = received, now
        comes = self._seen > self._before and now - self._seen_at < STALLED_S
        return received - self._before if comes else None


class VolunteerProgress:
    """Lines of `hetpeer join`: a line for each change of what it does or waits for; at work, the step every
    few seconds.

    `received` gives the bytes that the node has received.
    """

    def __init__(self, manifest: Manifest, received: Callable[[], int]) -> None:
        self._manifest = manifest
        self._received = received
        self._arriving = Arriving()
        self._contributed = False
        self._place: tuple[int, int] | None = None
        self._told = ""
        self._told_at = 0.0
        self._step = -1
        self._step_since = 0.0
        self._microbatches = 0
        """Microbatches of the lives that are over; `_credited` likewise."""
        self._credited = 0

    @property
    def thanks(self) -> str:
        """Work done in the lives that are over; empty if there was none."""
        if not self._microbatches:
            return ""
        data = self._manifest.data
        done = f"thank you: {counted(self._microbatches, 'microbatch', 'microbatches')} computed here"
        if not self._credited:
            return f"{done}; none is part of a committed step yet"
        return f"{done}, for a credit of {self._credited * data.tokens_per_sample:,} {data.unit} x blocks"

    async def show_forever(self, volunteer: Volunteer) -> None:
        """Look at `volunteer` twice a second and print changes. Never returns."""
        resting_since = time.monotonic()
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                now = time.monotonic()
                if volunteer.session.is_up and volunteer.member.phase in WORKING:
                    resting_since = now
                self._show(volunteer, now, now - resting_since)
        finally:
            self._microbatches += volunteer.figures.microbatches
            self._credited += volunteer.figures.credited

    def _show(self, volunteer: Volunteer, now: float, rest_s: float) -> None:
        """`rest_s`: seconds since it last took part in a step; 0 while it does."""
        member = volunteer.member
        if volunteer.figures.microbatches and not self._contributed:
            self._contributed = True
            say("first microbatch done: you are contributing")
        if member.place not in (None, self._place):
            self._place = member.place  # it may be ready before we look
            self._tell(f"getting {_blocks(member)} ready", now)
        coming = self._arriving.look(self._received(), member.phase is Phase.SYNCING, now)
        is_due = now - self._told_at >= EVERY_S
        if not rest_s:
            if is_due and self._contributed:
                self._tell(self._step_line(volunteer), now)
        elif coming is not None and rest_s > SHOWN_AFTER_S:
            if is_due:
                self._tell(self._state_line(member, coming), now)
        elif (line := _waiting_line(volunteer, rest_s)) and line != self._told:
            self._tell(line, now)

    def _tell(self, line: str, now: float) -> None:
        self._told, self._told_at = line, now
        say(line)

    def _step_line(self, volunteer: Volunteer) -> str:
        """The line on step, loss, place and speed; also how long the step has taken if that is long."""
        member, speed = volunteer.member, volunteer.tokens_per_second
        training, unit = self._manifest.training, self._manifest.data.unit
        loss = "" if member.loss is None else f"  loss {member.loss:.4f}"
        you = f"  you {speed:,.0f} {unit}/s" if speed else ""
        step, now = member.version or 0, time.monotonic()
        if step != self._step:
            self._step, self._step_since = step, now
        slow = now - self._step_since
        waiting = f"  in this step for {slow:.0f} s" if slow > EVERY_S else ""
        return f"step {step}/{training.steps}{loss}  {_blocks(member)}{you}{waiting}"

    def _state_line(self, member: Member, received: int) -> str:
        place = range(*member.place) if member.place is not None else range(0)
        size = state_bytes(self._manifest, place)
        come = f"{bytes_text(received)} received, of at most {bytes_text(size)} and the first data"
        return f"fetching the state of {_blocks(member)}: {come}"


def _waiting_line(volunteer: Volunteer, rest_s: float) -> str:
    """Text on what a volunteer without a step does or waits for; empty for short waits."""
    member, session = volunteer.member, volunteer.session
    if session.leaving:
        return ""
    if not session.is_up:
        return "waiting for the coordinator: it does not answer" if rest_s > SHOWN_AFTER_S else ""
    match member.phase:
        case _ if member.life.is_spared:
            return f"backup for {_blocks(member)}: steps are shorter without you; you step in if others leave"
        case Phase.PREPARING:
            return f"getting {_blocks(member)} ready"
        case Phase.SYNCING:
            return f"waiting for the state of {_blocks(member)}" if rest_s > SHOWN_AFTER_S else ""
        case Phase.READY:
            return "ready; waiting for other volunteers" if rest_s > SHOWN_AFTER_S else ""
        case _:
            return ""


def _blocks(member: Member) -> str:
    return "" if member.place is None else blocks_text(*member.place)


def _memory_text(volunteer: Volunteer) -> str:
    """`offers 3.4 GiB of memory (of 4.0 GiB the program itself takes 600 MiB); optimizer in memory`."""
    offered, offload = volunteer.offer.memory, volunteer.offload
    where = "" if offload is None else f"; {offload_text(offload.kind, apart=offered.apart)}"
    return f"offers {memory_text(offered)} ({volunteer.offer.main}){where}"


def figures_of(presence: Presence) -> VolunteerStatus:
    """Current progress; without a living volunteer only that of the run."""
    manifest, volunteer = presence.files.run.manifest, presence.life.volunteer
    known = VolunteerStatus(
        pid=os.getpid(), run=manifest.name[:64], unit=manifest.data.unit, steps=manifest.training.steps
    )
    if volunteer is None:
        return known
    member, figures = volunteer.member, volunteer.figures
    notes = link_notes(volunteer.links.links, presence.node.path)
    at_work = {
        "step": member.version or 0,
        "loss": member.loss,
        "blocks": member.place,
        "units_per_second": volunteer.tokens_per_second,
        "microbatches": figures.microbatches,
        "computes": figures.shares.lately(time.monotonic())[WorkerOccupation.COMPUTES],
        "memory": _memory_text(volunteer),
        "lines": tuple(
            LinkStatus(to=note.to, way=note.path, bytes_per_second=float(note.rate)) for note in notes
        ),
    }
    return known.model_copy(update=at_work)
