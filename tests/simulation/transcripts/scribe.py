"""Writes down a simulated history, one line per event."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from hetpeer.averaging import effects as e
from hetpeer.averaging.effects import Effect, InStep
from hetpeer.bootstrap.state import effects as d
from hetpeer.peer.simulate.sim_swarm import COORDINATOR
from hetpeer.peer.simulate.sim_volunteer import SimVolunteer
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.checked_symbols import CheckedSymbols
from tests.simulation.config import HistoryConfig
from tests.simulation.coverage import Coverage
from tests.simulation.sim_grouped import GroupedSwarm
from tests.simulation.transcripts.phrases import Phrase, Phrases

BLOCKS = 4
WIDTH = 110


class TranscriptLine:
    """Events of one moment: `who` does the same with several items, or to several others."""

    def __init__(self, time: float, who: str, to: str | None, phrase: Phrase) -> None:
        self.time, self.who = time, who
        self.to = [to] if to else []
        self.text, items = phrase
        self.items = list(items)

    def takes(self, other: TranscriptLine) -> bool:
        """Take in `other` if it can stand in the same line."""
        if (self.time, self.who, self.text) != (other.time, other.who, other.text):
            return False
        if self.to == other.to:
            self.items += [item for item in other.items if item not in self.items]
            return True
        if self.items == other.items and self.to and other.to:
            self.to += [to for to in other.to if to not in self.to]
            return True
        return False

    def __str__(self) -> str:
        text = self.text
        if self.items:
            one = len(self.items) == 1
            text = text.replace(
                "blocks {}" if one else "microbatch {}", "block {}" if one else "microbatches {}"
            )
            text = text.format(", ".join(self.items))
        to = f"to {', '.join(self.to)}: " if self.to else ""
        begin = f"{self.time:7.3f}  {self.who:<11}  "
        return textwrap.fill(
            begin + to + text,
            WIDTH,
            subsequent_indent=" " * (len(begin) + 4),
            break_long_words=False,
            break_on_hyphens=False,
        )


class Scribe:
    """The lines of one history, so far."""

    def __init__(self, *, names_steps: bool) -> None:
        self.phrases = Phrases(names_steps=names_steps)
        self.lines: list[TranscriptLine] = []

    def note(self, time: float, who: str, to: str | None, phrase: Phrase | None) -> None:
        """Something happens; None: nothing that is to be written down."""
        if phrase is None:
            return
        line = TranscriptLine(time, who, to, phrase)
        for known in reversed(self.lines):
            if known.time != time:
                break
            if known.takes(line):
                return
        self.lines.append(line)

    def compact(self) -> list[str]:
        """The lines as text; those that differ in their items alone are one."""
        found: list[TranscriptLine] = []
        for line in self.lines:
            moment = (known for known in reversed(found) if known.time == line.time)
            if not any(known.takes(line) for known in moment):
                found.append(line)
        return [str(line) for line in found]

    def follow(self, volunteer: SimVolunteer) -> None:
        """Write down what `volunteer` does."""
        world, name, carry_out = volunteer.swarm.world, volunteer.name, volunteer._carry_out
        start, kill, freeze = volunteer.start, volunteer.kill, volunteer.freeze

        def carry_out_noted(effect: Effect) -> None:
            match effect:
                case InStep(step, inner):
                    found = self.phrases.done(name, step, inner)
                    if found is not None:
                        self.note(world.now, name, *found)
                case e.Tell(message):
                    self.note(world.now, name, COORDINATOR, self.phrases.told(message))
                case _:
                    self.note(world.now, name, None, self.phrases.ended(effect))
            carry_out(effect)

        def noted(act: Callable[..., None], text: str) -> Callable[..., None]:
            def act_noted(*given: Any) -> None:
                self.note(world.now, name, None, (text.format(*given), ()))
                act(*given)

            return act_noted

        volunteer._carry_out = carry_out_noted  # type: ignore[method-assign]
        volunteer.start = noted(start, "starts")  # type: ignore[method-assign]
        volunteer.kill = noted(kill, "dies")  # type: ignore[method-assign]
        volunteer.freeze = noted(freeze, "freezes for {:.0f} seconds")  # type: ignore[method-assign]


class Scribbled:
    """Mixin for a swarm whose history `scribe` writes down. Nothing is repeated by chance."""

    scribe: Scribe

    def _echo(self) -> None:
        """Messages of the past are not repeated here."""

    def _carry_out(self, effect: d.Effect) -> None:
        now, phrases = self.world.now, self.scribe.phrases  # type: ignore[attr-defined]
        match effect:
            case d.Send(to, message):
                self.scribe.note(now, COORDINATOR, to, phrases.ordered(message))
            case d.Halt(_, completed):
                self.scribe.note(
                    now, COORDINATOR, None, ("ends the run" if completed else "halts the run", ())
                )
            case _:
                pass
        super()._carry_out(effect)  # type: ignore[misc]

    def write(self, record: dict[str, Any]) -> None:
        now = self.world.now  # type: ignore[attr-defined]
        self.scribe.note(now, COORDINATOR, None, self.scribe.phrases.recorded(record))
        super().write(record)  # type: ignore[misc]

    def crash_coordinator(self, away_s: float) -> None:
        self.scribe.note(self.world.now, COORDINATOR, None, ("dies", ()))  # type: ignore[attr-defined]
        super().crash_coordinator(away_s)  # type: ignore[misc]


class ScribbledSwarm(Scribbled, CheckedSwarm):
    """A run of mode `exact`."""


class ScribbledClusters(Scribbled, GroupedSwarm):
    """A run of mode `grouped`."""


def written(
    config: HistoryConfig, seed: int, late: Mapping[str, float], *, clusters: bool
) -> tuple[CheckedSwarm, Scribe]:
    """A swarm that is about to run, and its scribe. `late`: volunteer → seconds after which it starts."""
    scribe = Scribe(names_steps=config.staleness > 0)
    kind = ScribbledClusters if clusters else ScribbledSwarm
    swarm = kind(seed, config, CheckedSymbols(BLOCKS), Coverage())
    swarm.scribe = scribe
    for volunteer in swarm.volunteers.values():
        scribe.follow(volunteer)
        if volunteer.name in late:
            swarm.world.after(late[volunteer.name], _held_back(volunteer))
    return swarm, scribe


def _held_back(volunteer: SimVolunteer) -> Callable[[], None]:
    """`volunteer` does not start before what is returned is called."""
    start = volunteer.start

    def begin() -> None:
        volunteer.start = start  # type: ignore[method-assign]
        start()

    volunteer.start = lambda: None  # type: ignore[method-assign,assignment]
    return begin
