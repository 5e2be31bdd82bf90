"""Sentences for the owner: why a volunteer is paused, when it resumes, and which setting decides. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetpeer.peer.limits.governor import COOL_S, COOLER_C, GAME_OVER_S, GAME_SHARE, MAINS_S, POWER_OVER_S
from hetpeer.peer.limits.holds import Reason
from hetpeer.peer.limits.settings import Settings


def paused(reasons: Sequence[Reason], settings: Settings) -> str:
    """`paused (battery): …`, one sentence for each reason."""
    return f"paused ({','.join(reasons)}): {explained(reasons, settings)}"


def explained(reasons: Sequence[Reason], settings: Settings) -> str:
    """One sentence for each reason."""
    return "; ".join(SENTENCES[reason](settings) for reason in reasons)


def _temperature(settings: Settings) -> str:
    limits = settings.limits
    told = {"temperature_c": limits.temperature_c, "cpu_temperature_c": limits.cpu_temperature_c}
    allowed = " or ".join(f"limits.{key} = {celsius}" for key, celsius in told.items() if celsius)
    return f"too hot for {allowed}: it resumes after {COOL_S:.0f} s at {COOLER_C:.0f} °C less"


SENTENCES: Mapping[Reason, Callable[[Settings], str]] = {
    Reason.USER: lambda _: "you asked for it; hetpeer resume ends the pause",
    Reason.BATTERY: lambda _: (
        f"the machine runs on its battery: it resumes after {MAINS_S:.0f} s of mains power,"
        " or at once with when.on_battery = run"
    ),
    Reason.IDLE: lambda settings: (
        f"somebody uses the machine, or that is not known: it resumes after {settings.when.idle_after} "
        "without a key"
        " press (when.idle_after), or at once with when.mode = always"
    ),
    Reason.SCHEDULE: lambda settings: (
        f"it is outside {', '.join(settings.when.hours)}: it resumes then (when.hours),"
        " or at once with when.mode = always"
    ),
    Reason.TEMPERATURE: _temperature,
    Reason.POWER: lambda settings: (
        f"resting does not keep the GPU at limits.gpu_power_w = {settings.limits.gpu_power_w}:"
        f" it resumes after {POWER_OVER_S:.0f} s at that or less"
    ),
    Reason.GAME: lambda _: (
        f"another program uses {GAME_SHARE:.0%} of a GPU or more: it resumes after {GAME_OVER_S:.0f} s with"
        " less, or at once with when.yield_to_games = false"
    ),
    Reason.TRANSFER_CAP: lambda settings: (
        f"the {settings.limits.transfer_cap} of this month are used up: it resumes next month,"
        " or with a higher limits.transfer_cap"
    ),
    Reason.SETTINGS: lambda _: "a new compute worker starts with the new settings; it resumes by itself",
}
"""Reason → its sentence, given the settings in force."""
