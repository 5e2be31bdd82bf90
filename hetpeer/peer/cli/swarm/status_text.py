"""What `hetpeer status` tells of a swarm and of who runs here: lines for a file or a screen reader, tables for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hetpeer.peer.cli.volunteer.pause_command import standing_text
from hetpeer.peer.watching.human_units import bytes_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hetpeer.peer.control.control_messages import Reliable, Standing
    from hetpeer.peer.watching.swarm_status import PeerRow, SwarmStatus

FIRST = 10
"""Of the ranking by credit."""
NAMED = 5
"""Volunteers in one line."""
WORTH_TELLING = 0.05
"""A share of a worker's time in which it waits."""


def lines(found: SwarmStatus, own: Standing | None = None) -> Iterator[str]:
    """Plain text, one fact a line."""
    for label, text in _summary(found, own):
        yield f"{label:<10}{text}"
    for blocks, _, who in _stages(found):
        yield f"{'blocks':<10}{blocks}  {who}"
    for row in found.peers:
        yield f"{'peer':<10}{_short(row.peer)}  " + "  ".join(filter(None, _peer_cells(row, found)))
    for text in _left_over(found):
        yield f"{'leftover':<10}{text}"
    for who, facts in _links(found):
        yield f"{'link':<10}{who}  {facts}"
    for rank, who, facts in _credit(found):
        yield f"{'credit':<10}{rank}  {who}  {facts}"


def tables(found: SwarmStatus, own: Standing | None = None) -> RenderableType:
    """The same for a terminal. Cells are Text, so that nothing a peer says is read as markup."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    summary = Table.grid(padding=(0, 2))
    for label, text in _summary(found, own):
        summary.add_row(Text(label, style="bold"), Text(text))
    stages = Table("blocks", "holders", "who", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for blocks, count, who in _stages(found):
        stages.add_row(*map(Text, (blocks, count, who)), style="red" if count == "0" else "")
    columns = ("peer", "role", "name", "state", "blocks", "step", "speed", "busy", "device", "reached")
    peers = Table(*columns, box=None)
    peers.header_style = "dim"
    for row in found.peers:
        peers.add_row(Text(_short(row.peer)), *map(Text, _peer_cells(row, found)))
    links = Table("link", "line", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for who, facts in _links(found):
        links.add_row(Text(who), Text(facts))
    credit = Table("credit", "who", "share", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for cells in _credit(found):
        credit.add_row(*map(Text, cells))
    left = Text("\n".join(_left_over(found)), style="yellow")
    parts = ((left, left), (links, links.row_count), (credit, credit.row_count))
    more: list[RenderableType] = [part for part, is_there in parts if is_there]
    return Group(summary, "", stages, "", peers, *(each for part in more for each in ("", part)))


def own_lines(own: Standing | None) -> Iterator[tuple[str, str]]:
    if own is not None:
        yield "here", _here_text(own)
        if own.why:
            yield "why", own.why
        if own.dashboard is not None:
            yield "dashboard", own.dashboard
        if own.reliable is not None:
            yield from _reliable_lines(own.reliable)


def _reliable_lines(own: Reliable) -> Iterator[tuple[str, str]]:
    """Of the reliable peer that was asked: what it knows itself, also where the swarm says nothing."""
    leads = (
        "coordinates"
        if own.leader == own.peer
        else f"follows {_short(own.leader)}"
        if own.leader
        else "follows nobody"
    )
    done = (
        f"{own.version:,}/{own.steps:,} steps committed, checkpoint {own.stored:,}, {own.records:,} records"
    )
    yield "reliable", f"{leads} in term {own.term}; {done}"
    for member in own.members:
        facts = ["itself"] if member.peer == own.peer else []
        if member.lacks is not None:
            facts.append(f"lacks {_count(member.lacks, 'record')}" if member.lacks else "has all records")
        if member.silent_s is not None:
            facts.append(f"heard {_duration(member.silent_s)} ago")
        yield "member", f"{_short(member.peer)}  {', '.join(facts) or 'only who coordinates knows more'}"


def _here_text(own: Standing) -> str:
    month = "" if own.month_bytes is None else f"; {bytes_text(own.month_bytes)} sent and received this month"
    return f"{standing_text(own)}{month}"


def _summary(found: SwarmStatus, own: Standing | None) -> Iterator[tuple[str, str]]:
    """The first lines, as (label, text)."""
    yield from own_lines(own)
    progress, swarm = found.progress, found.swarm
    yield "run", f"{found.run.name}  {found.run.id}"
    yield "state", found.state + (f": {found.reason}" if found.reason else "")
    share = f"{progress.step / progress.steps:.0%}"
    loss = "" if progress.loss is None else f"  loss {progress.loss:.4f}"
    speed = f"  {swarm.tokens_per_second:,.0f} {found.run.unit}/s" if swarm.tokens_per_second else ""
    eta = f"  ETA {_duration(progress.eta_s)}" if progress.eta_s and found.state != "waiting" else ""
    yield "progress", f"step {progress.step}/{progress.steps} ({share}){loss}{speed}{eta}"
    coordinator = "coordinator here" if swarm.coordinator else "no coordinator"
    yield "swarm", f"{swarm.volunteers} volunteers, {swarm.working} working, {coordinator}"
    yield "weakest", f"block {swarm.weakest_block}, {_count(swarm.weakest_holders, 'holder')}"
    if found.unchecked:
        yield "unchecked", _unchecked(found)


def _unchecked(found: SwarmStatus) -> str:
    """Whom no spot check can find out."""
    rows = {row.peer: row for row in found.peers}
    named, more = found.unchecked[:NAMED], len(found.unchecked[NAMED:])
    who = ", ".join(f"{_name(rows[peer])} ({_blocks(rows[peer])})" for peer in named)
    others = f" and {more} more" if more else ""
    return f"{who}{others}: no other holds all blocks of theirs, so no spot check looks at what they count"


def _blocks(row: PeerRow) -> str:
    return f"{row.blocks[0]}-{row.blocks[1] - 1}" if row.blocks else ""


def _stages(found: SwarmStatus) -> Iterator[tuple[str, str, str]]:
    """Runs of blocks with the same holders: blocks, how many, who."""
    names = {row.peer: _name(row) for row in found.peers}
    first = 0
    for row, following in zip(found.blocks, [*found.blocks[1:], None], strict=True):
        if following is None or following.holders != row.holders:
            blocks = f"{first}-{row.block}" if first < row.block else str(row.block)
            yield blocks, str(len(row.holders)), ", ".join(names[peer] for peer in row.holders) or "nobody"
            first = row.block + 1


def _credit(found: SwarmStatus) -> Iterator[tuple[str, str, str]]:
    """Rank, who it is, and how much of all credit it has: the first ten, and this machine's."""
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
        who = (row.name or _short(row.peer)) + (", you" if own else "")
        yield f"{row.rank}." if row.rank else "-", who, f"{row.credit:,} {found.run.unit} x blocks{share}"


def _left_over(found: SwarmStatus) -> Iterator[str]:
    """What waits on the task board."""
    names = {row.peer: _name(row) for row in found.peers}
    for row in found.leftovers:
        kept = names.get(row.sender, _short(row.sender))
        count = _count(row.microbatches, "microbatch", "microbatches")
        yield f"{count} of step {row.step} for block {row.block}, kept by {kept}"


def _links(found: SwarmStatus) -> Iterator[tuple[str, str]]:
    """From whom to whom, and what is known of the line and saved on it."""
    names = _names(found)
    for row in found.peers:
        for link in row.links:
            way, _, relay = link.path.partition("through ")
            facts = [way or f"through {names.get(relay, relay)}"] if link.path else []
            if link.bytes_per_second:
                facts.append(f"{link.bytes_per_second * 8 / 1e6:,.0f} Mbit/s")
            if link.saved_bytes:
                facts.append(f"{link.ratio:.1f} times smaller, {bytes_text(link.saved_bytes)} saved")
            yield f"{_name(row)} → {names.get(link.to, link.to)}", ", ".join(facts) or "nothing is known yet"


def _peer_cells(row: PeerRow, found: SwarmStatus) -> list[str]:
    """Role, name, state, blocks, step, speed, what its worker does, device, how it is reached."""
    speed = f"{row.tokens_per_second:,.0f} {found.run.unit}/s" if row.tokens_per_second else ""
    reached = _reached(row, _names(found))
    step = f"step {row.step}"
    return [row.role, row.name, row.state, _blocks(row), step, speed, _busy(row), row.device, reached]


def _busy(row: PeerRow) -> str:
    """`93%`, or with what it mostly waits for: `61%, data 30%`."""
    if not row.computes:
        return ""
    rest = max(1.0 - row.computes - row.waits_data - row.waits_room, 0.0)
    waits, what = max((row.waits_data, "data"), (row.waits_room, "room"), (rest, "a step"))
    return f"{row.computes:.0%}" + (f", {what} {waits:.0%}" if waits >= WORTH_TELLING else "")


def _reached(row: PeerRow, names: Mapping[str, str]) -> str:
    """Nothing while it is not known."""
    if row.reach == "private":
        ways = ", ".join(names.get(relay, relay) for relay in row.relays)
        return f"through {ways}" if ways else "by nobody"
    return "directly" if row.reach == "public" else ""


def _names(found: SwarmStatus) -> dict[str, str]:
    """The end of each peer's id, as adverts have it → what it is called."""
    return {row.peer[-8:]: _name(row) for row in found.peers}


def _name(row: PeerRow) -> str:
    return row.name or _short(row.peer)


def _short(peer: str) -> str:
    return f"…{peer[-6:]}"


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def _duration(seconds: float) -> str:
    """`45s`, `3m 05s`, `2h 07m`, `4d 02h`."""
    whole = round(seconds)
    for unit, size, smaller, smaller_size in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // smaller_size:02}{smaller}"
    return f"{whole}s"
