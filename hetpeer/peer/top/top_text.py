"""Text of `hetpeer top`. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from hetpeer.dht.base.errors import escaped, short_id
from hetpeer.peer.control.control_messages import DaemonStatus, VolunteerStatus
from hetpeer.peer.limits.nvml import GpuLoad
from hetpeer.peer.watching.human_units import blocks_text, bytes_text, counted
from hetpeer.peer.web.machine_load import MachineLoad


def lines(standing: DaemonStatus, load: MachineLoad | None, gpus: Sequence[GpuLoad] = ()) -> Iterator[str]:
    """Lines of a label and a text: the daemon, the run once it is known, and the machine if `load` is
    given.
    """
    reason = f" ({standing.reason})" if standing.reason else ""
    until = "" if standing.until is None else f", until {_clock(standing.until)}"
    yield _line("state", f"{standing.state}{reason} since {_clock(standing.since)}{until}")
    if standing.figures is not None:
        yield from _work(standing.figures)
    if load is not None:
        yield _line("processor", f"{load.cpu:.0%} of all cores busy; hetpeer uses {load.own_cores:.1f} cores")
        used, own = bytes_text(load.memory_used), bytes_text(load.own_memory)
        yield _line("memory", f"{used} of {bytes_text(load.memory_total)} used; hetpeer uses {own}")
        yield _line("disk", f"{bytes_text(load.disk_free)} free")
    for gpu in gpus:
        used, total = bytes_text(gpu.memory_used), bytes_text(gpu.memory_total)
        yield _line("gpu", f"{gpu.name}  {gpu.busy:.0%} busy, {used} of {total} used by all programs")


def _work(figures: VolunteerStatus) -> Iterator[str]:
    yield _line("run", figures.run)
    share = f" ({figures.step / figures.steps:.0%})" if figures.steps else ""
    loss = "" if figures.loss is None else f"  loss {figures.loss:.4f}"
    yield _line("step", f"{figures.step:,}/{figures.steps:,}{share}{loss}")
    blocks = "" if figures.blocks is None else f"  {blocks_text(*figures.blocks)}"
    speed = f"{figures.units_per_second:,.0f} {figures.unit}/s, {figures.computes:.0%} of the time computing"
    yield _line("you", f"{speed}, {counted(figures.microbatches, 'microbatch', 'microbatches')}{blocks}")
    for link in figures.lines:
        way, _, relay = link.way.partition("through ")
        path = f"  through {short_id(relay)}" if relay else f"  {way}" if way else ""
        yield _line("link", f"→ {short_id(link.to)}  {link.bytes_per_second * 8 / 1e6:,.1f} Mbit/s{path}")


def _line(label: str, text: str) -> str:
    return f"{label:<11}{escaped(text)}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
