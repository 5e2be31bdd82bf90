"""What a daemon tells the person who started it: a line now and then, on standard error."""

from __future__ import annotations

import asyncio
import sys
import time

from hetpeer.averaging.member import Member, Phase
from hetpeer.bootstrap.manifest import Manifest
from hetpeer.bootstrap.service import CoordinatorService
from hetpeer.peer.volunteer import Figures

LOOK_S = 0.5
EVERY_S = 5.0
"""Seconds between two lines while nothing but the step number changes."""


class VolunteerProgress:
    """Lines of `hetpeer join`: every change of phase, and the step every few seconds."""

    def __init__(self, member: Member, manifest: Manifest, figures: Figures) -> None:
        self._member = member
        self._steps = manifest.training.steps
        self._tokens = manifest.training.microbatch_size * manifest.data.sequence_length
        self._figures = figures
        self._told: tuple[str, tuple[int, int] | None] = ("", None)
        self._told_at = 0.0

    async def show_forever(self) -> None:
        """Look at the volunteer twice a second and print what is new."""
        counted, since = 0, time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            if now - since >= EVERY_S:
                done = self._figures.microbatches - counted
                self._figures.tokens_per_second = done * self._tokens / (now - since)
                counted, since = self._figures.microbatches, now
            self._look(now)

    def _look(self, now: float) -> None:
        member = self._member
        working = member.phase in (Phase.TRAINING, Phase.REDUCING, Phase.APPLYING, Phase.READY)
        state = "working" if working else member.phase.value
        key = (state, member.place)
        if key == self._told and (not working or now - self._told_at < EVERY_S):
            return
        self._told, self._told_at = key, now
        place = "" if member.place is None else f"  blocks {member.place[0]}-{member.place[1] - 1}"
        loss = "" if member.loss is None else f"  loss {member.loss:.4f}"
        speed = f"  you {self._figures.tokens_per_second:,.0f} tok/s" if working else ""
        step = f"  step {member.version or 0}/{self._steps}"
        print(f"{state}{place}{step}{loss}{speed}", file=sys.stderr, flush=True)


class CoordinatorProgress:
    """Lines of `hetpeer bootstrap`: each change of state and a step line every few seconds."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service
        self._told: tuple[str, int] = ("", -1)
        self._told_at = 0.0

    async def show_forever(self) -> None:
        """Look at the coordinator twice a second and print what is new."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        core = self._service.core
        key = (core.state.value if core.missing_blocks else "running", len(core.members.volunteers))
        if key == self._told and (core.missing_blocks or now - self._told_at < EVERY_S):
            return
        self._told, self._told_at = key, now
        last = core.history.commits.get(core.history.version - 1)
        loss = "" if last is None else f"  loss {last['loss']:.4f}"
        line = f"step {core.history.version}  {key[1]} volunteers{loss}"
        if core.missing_blocks:
            line += f"  waiting for volunteers for blocks {', '.join(map(str, core.missing_blocks))}"
        print(line, file=sys.stderr, flush=True)
