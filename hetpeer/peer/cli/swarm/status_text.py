"""Output of `hetpeer status`: lines for a file or a screen reader, tables for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetpeer.dht.base.errors import escaped, short_id
from hetpeer.peer.cli.swarm.peer_text import (
    duration,
    machine_cells,
    name_at,
    name_of,
    names_of,
    speed_text,
    work_cells,
)
from hetpeer.peer.cli.swarm.plan_text import plan_text, seat_cells
from hetpeer.peer.cli.volunteer.pause_command import standing_text
from hetpeer.peer.limits.amounts import block_range, blocks_text, bytes_text, counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hetpeer.peer.control.control_messages import DaemonStatus, ReliableStatus, VolunteerStatus
    from hetpeer.peer.limits.nvml import GpuLoad
    from hetpeer.peer.watching.swarm_status import PeerRow, SwarmStatus
    from hetpeer.peer.web.machine_load import MachineLoad

FIRST = 10
"""Contributors shown."""
NAMED = 5
"""Volunteers named in one line; moves shown."""


@dataclass(frozen=True, slots=True)
class Here:
    """The daemon of this machine; the load of the machine is known from the second look of --watch on."""

    own: DaemonStatus
    load: MachineLoad | None = None
    gpus: tuple[GpuLoad, ...] = ()


def lines(found: SwarmStatus, here: Here | None = None) -> Iterator[str]:
    """Plain text, one fact a line."""
    for label, text in _summary(found, here):
        yield f"{label:<10}{text}"
    for blocks, _, who in _stages(found):
        yield f"{'blocks':<10}{blocks}  {who}"
    names = names_of(found)
    for row in found.peers:
        cells = [*work_cells(row, found, _blocks(row)), *machine_cells(row, names)]
        yield f"{'peer':<10}{short_id(row.peer)}  " + "  ".join(filter(None, cells))
    for text in _left_over(found):
        yield f"{'leftover':<10}{text}"
    for who, facts in _links(found):
        yield f"{'link':<10}{who}  {facts}"
    if found.plan is not None:
        yield f"{'plan':<10}{plan_text(found.plan)}"
        for seat in seat_cells(found.plan):
            yield f"{'planned':<10}{'  '.join(seat)}"
    for text in _moves(found):
        yield f"{'move':<10}{text}"
    for rank, who, facts in _credit(found):
        yield f"{'credit':<10}{rank}  {who}  {facts}"


def tables(found: SwarmStatus, here: Here | None = None) -> RenderableType:
    """The same for a terminal. Cells are Text, so that nothing a peer says is read as markup."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    summary = Table.grid(padding=(0, 2))
    for label, text in _summary(found, here):
        summary.add_row(Text(label, style="bold"), Text(text))
    stages = Table("blocks", "holders", "who", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for blocks, count, who in _stages(found):
        stages.add_row(*map(Text, (blocks, count, who)), style="red" if count == "0" else "")
    columns = "peer", "role", "name", "state", "blocks", "step", "speed", "busy"
    peers = Table(*columns, box=None, header_style="dim")
    machines = Table("peer", "device", "memory", "line", "reached", "steady", box=None, header_style="dim")
    names = names_of(found)
    for row in found.peers:
        blocks = block_range(*row.blocks) if row.blocks else ""
        peers.add_row(Text(short_id(row.peer)), *map(Text, work_cells(row, found, blocks)))
        machines.add_row(Text(name_of(row)), *map(Text, machine_cells(row, names)))
    links = Table("link", "state", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for who, facts in _links(found):
        links.add_row(Text(who), Text(facts))
    credit = Table("credit", "who", "share", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for cells in _credit(found):
        credit.add_row(*map(Text, cells))
    left = Text("\n".join(_left_over(found)), style="yellow")
    moves = Text("\n".join(_moves(found)))
    plan: RenderableType = ""
    if found.plan is not None:
        seats = Table("planned", "place", "now", box=None, header_style="dim", padding=(0, 2, 0, 0))
        for cells in seat_cells(found.plan):
            seats.add_row(*map(Text, cells))
        plan = Group(Text(plan_text(found.plan)), seats)
    parts = (
        (left, left),
        (links, links.row_count),
        (plan, plan),
        (moves, moves),
        (credit, credit.row_count),
    )
    more: list[RenderableType] = [part for part, is_there in parts if is_there]
    always = summary, "", stages, "", peers, "", machines
    return Group(*always, *(each for part in more for each in ("", part)))


def own_lines(here: Here | None) -> Iterator[tuple[str, str]]:
    """(label, text) of what this machine's daemon does, and of the machine where its load is known."""
    if here is None:
        return
    own = here.own
    yield "here", _here_text(own)
    if own.why:
        yield "why", own.why
    if own.dashboard is not None:
        yield "dashboard", own.dashboard
    if own.figures is not None:
        yield from _volunteer_lines(own.figures)
    if own.reliable is not None:
        yield from _reliable_lines(own.reliable)
    if (load := here.load) is not None:
        yield "processor", f"{load.cpu:.0%} of all cores busy; hetpeer uses {load.own_cores:.1f} cores"
        used, own_memory = bytes_text(load.memory_used), bytes_text(load.own_memory)
        yield "memory", f"{used} of {bytes_text(load.memory_total)} used; hetpeer uses {own_memory}"
        yield "disk", f"{bytes_text(load.disk_free)} free"
    for gpu in here.gpus:
        used, total = bytes_text(gpu.memory_used), bytes_text(gpu.memory_total)
        yield "gpu", escaped(f"{gpu.name}  {gpu.busy:.0%} busy, {used} of {total} used by all programs")


def _volunteer_lines(figures: VolunteerStatus) -> Iterator[tuple[str, str]]:
    """Lines on the volunteer's work and links; known even while the swarm does not answer."""
    blocks = "" if figures.blocks is None else f"  {blocks_text(*figures.blocks)}"
    speed = f"{figures.units_per_second:,.0f} {figures.unit}/s, {figures.computes:.0%} of the time computing"
    yield "you", escaped(f"{speed}, {counted(figures.microbatches, 'microbatch', 'microbatches')}{blocks}")
    if figures.memory:
        yield "memory", escaped(figures.memory)
    for link in figures.lines:
        way, _, relay = link.way.partition("through ")
        path = f"through {short_id(relay)}, " if relay else f"{way}, " if way else ""
        yield "link", escaped(f"you → {short_id(link.to)}  {path}{speed_text(link.bytes_per_second)}")


def _reliable_lines(own: ReliableStatus) -> Iterator[tuple[str, str]]:
    """Lines on the asked reliable peer's own view; known even while the swarm does not answer."""
    leads = (
        "coordinates"
        if own.leader == own.peer
        else f"follows {short_id(own.leader)}"
        if own.leader
        else "follows no coordinator"
    )
    done = (
        f"{own.version:,}/{own.steps:,} steps committed, checkpoint {own.stored:,}, {own.records:,} records"
    )
    yield "reliable", f"{leads} in term {own.term}; {done}"
    for member in own.members:
        facts = ["itself"] if member.peer == own.peer else []
        if member.lacks is not None:
            facts.append(f"lacks {counted(member.lacks, 'record')}" if member.lacks else "has all records")
        if member.silent_s is not None:
            facts.append(f"heard {duration(member.silent_s)} ago")
        yield "member", f"{short_id(member.peer)}  {', '.join(facts) or 'only the coordinator knows more'}"


def _here_text(own: DaemonStatus) -> str:
    month = "" if own.month_bytes is None else f"; {bytes_text(own.month_bytes)} sent and received this month"
    return f"{standing_text(own)}{month}"


def _summary(found: SwarmStatus, here: Here | None) -> Iterator[tuple[str, str]]:
    """The first lines, as (label, text)."""
    yield from own_lines(here)
    progress, swarm = found.progress, found.swarm
    yield "run", f"{found.run.name}  {found.run.id}"
    yield "state", found.state + (f": {found.reason}" if found.reason else "")
    share = f"{progress.step / progress.steps:.0%}"
    loss = "" if progress.loss is None else f"  loss {progress.loss:.4f}"
    speed = f"  {swarm.tokens_per_second:,.0f} {found.run.unit}/s" if swarm.tokens_per_second else ""
    eta = f"  ETA {duration(progress.eta_s)}" if progress.eta_s and found.state != "waiting" else ""
    yield "progress", f"step {progress.step}/{progress.steps} ({share}){loss}{speed}{eta}"
    volunteers = f"{counted(swarm.volunteers, 'volunteer')}, {swarm.working} working"
    yield "swarm", f"{volunteers}; {_coordinator(found)}"
    yield "weakest", weakest_text(swarm.weakest_block, swarm.weakest_holders)
    if found.unchecked:
        yield "unchecked", _unchecked(found)


def _coordinator(found: SwarmStatus) -> str:
    """Name of the coordinator, as in `coordinated by …x9fQ2a`."""
    leaders = [row for row in found.peers if row.role == "coordinator"] if found.swarm.coordinator else []
    return f"coordinated by {name_of(leaders[0])}" if leaders else "no coordinator"


def weakest_text(block: int, holders: int) -> str:
    """`block 0 has one holder only`: what is lost first when volunteers leave."""
    who = {0: "no holder", 1: "one holder only"}.get(holders, f"{holders} holders")
    return f"block {block} has {who}"


def _unchecked(found: SwarmStatus) -> str:
    """Volunteers that no spot check can examine, because nobody else holds all of their blocks."""
    rows = {row.peer: row for row in found.peers}
    named, more = found.unchecked[:NAMED], len(found.unchecked[NAMED:])
    who = ", ".join(f"{name_of(rows[peer])} ({_blocks(rows[peer])})" for peer in named)
    others = f" and {more} more" if more else ""
    return f"{who}{others}: nobody else holds all of their blocks, so spot checks cannot examine their work"


def _blocks(row: PeerRow) -> str:
    return blocks_text(*row.blocks) if row.blocks else ""


def _stages(found: SwarmStatus) -> Iterator[tuple[str, str, str]]:
    """Neighbouring blocks with the same holders: (blocks, number of holders, who they are)."""
    names = {row.peer: name_of(row) for row in found.peers}
    first = 0
    for row, following in zip(found.blocks, [*found.blocks[1:], None], strict=True):
        if following is None or following.holders != row.holders:
            yield (
                block_range(first, row.block + 1),
                str(len(row.holders)),
                ", ".join(names[peer] for peer in row.holders) or "nobody",
            )
            first = row.block + 1


def _credit(found: SwarmStatus) -> Iterator[tuple[str, str, str]]:
    """(rank, who, share of all credit) of the first ten contributors and of this machine."""
    credit = found.credit
    if credit is None:
        return
    first = credit.first[:FIRST]
    yours = (
        () if credit.yours is None or credit.yours.peer in {row.peer for row in first} else (credit.yours,)
    )
    for row in (*first, *yours):
        own = credit.yours is not None and row.peer == credit.yours.peer
        share = f" ({row.credit / credit.total:.1%})" if credit.total else ""
        who = (row.name or short_id(row.peer)) + (", you" if own else "")
        yield f"{row.rank}." if row.rank else "-", who, f"{row.credit:,} {found.run.unit} x blocks{share}"


def _moves(found: SwarmStatus) -> list[str]:
    """The newest moves of blocks, a line each."""
    return [escaped(row.text) for row in (found.moves or ())[-NAMED:]]


def _left_over(found: SwarmStatus) -> Iterator[str]:
    """Leftovers on the task board, a line each."""
    names = {row.peer: name_of(row) for row in found.peers}
    for row in found.leftovers:
        kept = names.get(row.sender, short_id(row.sender))
        count = counted(row.microbatches, "microbatch", "microbatches")
        yield f"{count} of step {row.step} need a holder of block {row.block}; kept by {kept}"


def _links(found: SwarmStatus) -> Iterator[tuple[str, str]]:
    """(sender → receiver, path and speed of the link and the bytes saved on it)."""
    names = names_of(found)
    for row in found.peers:
        for link in row.links:
            way, _, relay = link.path.partition("through ")
            facts = [way or f"through {name_at(relay, names)}"] if link.path else []
            if link.bytes_per_second:
                facts.append(speed_text(link.bytes_per_second))
            if link.trip_s:
                facts.append(f"{1e3 * link.trip_s:.0f} ms there and back")
            if link.saved_bytes:
                facts.append(f"{link.ratio:.1f} times smaller, {bytes_text(link.saved_bytes)} saved")
            if link.why:
                facts.append(link.why)
            yield f"{name_of(row)} → {name_at(link.to, names)}", ", ".join(facts) or "not measured yet"
