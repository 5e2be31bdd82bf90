"""SVG map of a swarm: peers by the time between them, lines by their rate, and the same in words. Pure.

Widths, dashes and shapes say what colours say. The same bytes for the same status and the same map before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from hetpeer.dht.base.errors import escaped, short_id
from hetpeer.dht.discovery import BACKUP
from hetpeer.peer.limits.amounts import counted, mbit_text
from hetpeer.peer.watching.svg_shapes import FAINT, INK, PAPER, document, rect, short, text
from hetpeer.peer.watching.swarm_map import Floats, completed, positions, spread, turned_like
from hetpeer.peer.watching.swarm_status import PeerRow, SwarmStatus
from hetpeer.stages.planning.network_coordinates import Coordinate

MOST = 256
"""Peers that are drawn."""
WIDTH, HEIGHT, MARGIN, LEGEND = 760, 500, 64, 84
LABEL, LETTER, LINE_HEIGHT = 16, 6.4, 13
"""Longest label in characters, and the room of one."""
HERE, AWAY, RELIABLE, OWN = "#2f7d6d", "#ffffff", "#3b5b92", "#24292f"
HALO = f' paint-order="stroke" stroke="{PAPER}" stroke-width="3"'
"""Attributes of names, which lines pass behind."""
DOT = 0.45
"""Radius of a backup's dot, as a share of its disc's."""
FASTEST = 1.25e10
"""Bytes/s beyond which a measured rate is no true figure."""
MBIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class _Kind:
    """Lines of about one rate: least bytes/s, words, and look."""

    least: float
    words: str
    colour: str
    width: float
    dashes: str


KINDS = (
    _Kind(100 * MBIT, "100 Mbit/s or more", "#2f7d6d", 3.4, ""),
    _Kind(10 * MBIT, "10 to 100 Mbit/s", "#b26a00", 2.0, "9 4"),
    _Kind(1e-9, "less than 10 Mbit/s", "#b3362c", 1.4, "3 3"),
    _Kind(0.0, "not measured", "#8c959f", 0.8, "1 4"),
)


@dataclass(frozen=True, slots=True)
class DrawnMap:
    """A map as a picture and in words; `points`: peer → its place in seconds, for the next map."""

    svg: str
    words: str
    points: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Line:
    """A line between two peers, by their indices: the slower of both directions."""

    one: int
    other: int
    rate: float
    """Bytes/s; 0: not measured."""


def drawn_map(
    status: SwarmStatus, you: str = "", before: Mapping[str, tuple[float, float]] | None = None
) -> DrawnMap:
    """The map of a swarm. `you`: the peer that is marked; `before`: `points` of the last map."""
    rows = _chosen(status.peers, you)
    lines, times = _lines(rows)
    latency = completed(np.where(np.isfinite(times), times, _by_coordinates(rows)))
    points = positions(latency)
    if before:
        known = [(number, before[row.peer]) for number, row in enumerate(rows) if row.peer in before]
        same = [(number, place) for place, (number, _) in enumerate(known)]
        points = turned_like(points, np.array([point for _, point in known]).reshape(-1, 2), same)
    words = _words(rows, lines, times, len(status.peers))
    return DrawnMap(
        svg=_picture(rows, lines, points, words, you),
        words=words,
        points={row.peer: (float(x), float(y)) for row, (x, y) in zip(rows, points, strict=True)},
    )


def _chosen(peers: Sequence[PeerRow], you: str) -> list[PeerRow]:
    """At most MOST peers: this one, reliable ones, and those with most links first."""
    first = sorted(
        peers, key=lambda row: (row.peer != you, row.role == "volunteer", -len(row.links), row.peer)
    )
    return sorted(first[:MOST], key=lambda row: row.peer)


def _lines(rows: Sequence[PeerRow]) -> tuple[list[_Line], Floats]:
    """Lines that somebody named, and one-way seconds of all pairs: NaN where nobody measured."""
    ends = {row.peer[-8:]: number for number, row in enumerate(rows)}
    times = np.full((len(rows), len(rows)), np.nan)
    rates: dict[tuple[int, int], list[float]] = {}
    for number, row in enumerate(rows):
        for link in row.links:
            other = ends.get(link.to, number)
            if other == number:
                continue
            if link.trip_s > 0:
                times[number, other] = link.trip_s / 2
            pair = min(number, other), max(number, other)
            true = 0 < link.bytes_per_second <= FASTEST
            rates.setdefault(pair, []).extend([link.bytes_per_second] if true else [])
    return [_Line(*pair, min(known, default=0.0)) for pair, known in sorted(rates.items())], times


def _by_coordinates(rows: Sequence[PeerRow]) -> Floats:
    """One-way seconds of all pairs by their network coordinates; NaN where one of them has none."""
    known = [Coordinate.of(row.coordinate) for row in rows]
    none = (math.nan,) * 3
    at = np.array([none if one is None else one.at for one in known]).reshape(-1, 3)
    height = np.array([math.nan if one is None else one.height for one in known])
    trips = np.linalg.norm(at[:, None] - at[None], axis=2) + height[:, None] + height[None]
    return np.asarray(trips / 2)


# ── in words ────────────────────────────────────────────────────────────────────────────────────────────────


def _words(rows: Sequence[PeerRow], lines: Sequence[_Line], times: Floats, there: int) -> str:
    """The picture in words, for those who do not see it."""
    volunteers = sum(row.role == "volunteer" for row in rows)
    told = [f"{counted(volunteers, 'volunteer')} and {counted(len(rows) - volunteers, 'reliable peer')}"]
    if there > len(rows):
        told[0] += f", of {there} peers"
    both = np.fmin(times, times.T)
    pairs = np.argwhere(np.triu(np.isfinite(both), 1))
    seconds = both[tuple(pairs.T)].tolist()
    for what, at in _extremes(seconds, "nearest", "farthest", "time"):
        told.append(f"{what}: {_ends(rows, *pairs[at].tolist())}, {_time(seconds[at])} one way")
    measured = [line for line in lines if line.rate]
    for what, at in _extremes([line.rate for line in measured], "slowest line", "fastest line", "line"):
        line = measured[at]
        told.append(f"{what}: {_ends(rows, line.one, line.other)}, {mbit_text(line.rate)}")
    return "; ".join(told)


def _extremes(amounts: Sequence[float], least: str, most: str, alone: str) -> Iterator[tuple[str, int]]:
    """(word, index) of the least and the most of `amounts`; `alone` if they are one."""
    if not amounts:
        return
    low, high = int(np.argmin(amounts)), int(np.argmax(amounts))
    yield (alone if low == high else least), low
    if low != high:
        yield most, high


def _ends(rows: Sequence[PeerRow], one: int, other: int) -> str:
    return f"{_called(rows[one])} and {_called(rows[other])}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _called(row: PeerRow) -> str:
    return escaped(row.name) or short_id(row.peer)


# ── as a picture ────────────────────────────────────────────────────────────────────────────────────────────


def _picture(rows: Sequence[PeerRow], lines: Sequence[_Line], points: Floats, words: str, you: str) -> str:
    radius = 7.0 if len(rows) <= 30 else 5.0 if len(rows) <= 80 else 3.6
    inner = WIDTH - 2 * MARGIN, HEIGHT - LEGEND - MARGIN
    least = (4.0 if len(rows) <= 30 else 2.6) * radius
    placed, pixels = spread(points, *inner, least)
    placed = placed + np.array((MARGIN, MARGIN / 2))
    body = [f"<title>{escape(words)}</title>"]
    thin = 1.0 if len(rows) <= 80 else 0.4
    slow_above = sorted(lines, key=lambda line: -line.rate if line.rate else -math.inf)
    body += [_drawn_line(line, rows, placed, thin) for line in slow_above]
    body += [
        _node(row, (float(x), float(y)), radius, own=row.peer == you)
        for row, (x, y) in zip(rows, placed, strict=True)
    ]
    labels = list(_labels(rows, placed, radius, you))
    body += labels
    return document(WIDTH, HEIGHT, [*body, *_legend(pixels, len(rows) - len(labels))])


def _kind(rate: float) -> _Kind:
    return next(kind for kind in KINDS if rate >= kind.least)


def _stroke(kind: _Kind, thin: float = 1.0) -> str:
    dashes = f' stroke-dasharray="{kind.dashes}"' if kind.dashes else ""
    return f'stroke="{kind.colour}" stroke-width="{thin * kind.width:.2g}"{dashes}'


def _drawn_line(line: _Line, rows: Sequence[PeerRow], placed: Floats, thin: float) -> str:
    """A line with its rate under the pointer; `thin`: factor of its width."""
    (x1, y1), (x2, y2) = placed[line.one], placed[line.other]
    rate = mbit_text(line.rate) if line.rate else "not measured"
    hint = f"{_ends(rows, line.one, line.other)}: {rate}"
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="line" {ends} {_stroke(_kind(line.rate), thin)}><title>{escape(hint)}</title></line>'


def _node(row: PeerRow, at: tuple[float, float], radius: float, *, own: bool) -> str:
    """A disc for a volunteer, filled if it holds blocks, with a dot if it is a backup; a square for a
    reliable peer; a ring for `own`.
    """
    x, y = at
    hint = f"<title>{escape(f'{_called(row)}: {row.role}, {row.state}')}</title>"
    ring = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius + 4:.1f}" fill="none" stroke="{OWN}"/>' if own else ""
    )
    if row.role == "volunteer":
        fill = HERE if row.holds else AWAY
        look = f'r="{radius:.1f}" fill="{fill}" stroke="{HERE}" stroke-width="1.6"'
        disc = f'<circle class="node" cx="{x:.1f}" cy="{y:.1f}" {look}>{hint}</circle>'
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{DOT * radius:.1f}" fill="{HERE}"/>'
        return f"{ring}{disc}{dot if row.state == BACKUP else ''}"
    place = f'x="{x - radius:.1f}" y="{y - radius:.1f}" width="{2 * radius:.1f}" height="{2 * radius:.1f}"'
    return f'{ring}<rect class="node" {place} fill="{RELIABLE}" stroke="{RELIABLE}">{hint}</rect>'


def _labels(rows: Sequence[PeerRow], placed: Floats, radius: float, you: str) -> Iterator[str]:
    """Names beside the peers, where there is room: one's own in any case, then reliable peers."""
    taken = [(x - radius, y - radius, x + radius, y + radius) for x, y in placed.tolist()]
    order = sorted(
        range(len(rows)),
        key=lambda number: (rows[number].peer != you, rows[number].role == "volunteer", number),
    )
    for number in order:
        name, (x, y) = short(_called(rows[number]), LABEL), placed[number].tolist()
        wide, gap = LETTER * len(name), radius + (7 if rows[number].peer == you else 4)
        for anchor, left, top in (
            ("start", x + gap, y - LINE_HEIGHT / 2),
            ("end", x - gap - wide, y - LINE_HEIGHT / 2),
            ("middle", x - wide / 2, y - gap - LINE_HEIGHT),
            ("middle", x - wide / 2, y + gap),
        ):
            box = left, top, left + wide, top + LINE_HEIGHT
            inside = box[0] >= 0 and box[2] <= WIDTH and box[1] >= 0 and box[3] <= HEIGHT - LEGEND
            free = rows[number].peer == you or not any(_overlap(box, other) for other in taken)
            if inside and free:
                taken.append(box)
                at = {"start": left, "end": left + wide, "middle": x}[anchor]
                yield text(at, top + 10, name, anchor=anchor, more=HALO)
                break


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _legend(pixels: float, unnamed: int) -> Iterator[str]:
    """Kinds of lines and nodes, the scale, and how many names found no room."""
    top = HEIGHT - LEGEND + 24
    for number, kind in enumerate(KINDS):
        x = MARGIN / 2 + 178 * number
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x + 34:.1f}" y2="{top}" {_stroke(kind)}/>'
        yield text(x + 42, top + 4, kind.words, fill=FAINT)
    y = top + 24
    marks = (("holds blocks", HERE), ("holds none", AWAY), ("backup", AWAY))
    for number, (words, fill) in enumerate(marks):
        x = MARGIN / 2 + 6 + 118 * number
        yield f'<circle cx="{x:.1f}" cy="{y}" r="6" fill="{fill}" stroke="{HERE}" stroke-width="1.6"/>'
        if words == BACKUP:
            yield f'<circle cx="{x:.1f}" cy="{y}" r="{6 * DOT:.1f}" fill="{HERE}"/>'
        yield text(x + 14, y + 4, words, fill=FAINT)
    yield rect(MARGIN / 2 + 330, y - 6, 12, 12, fill=RELIABLE, stroke=RELIABLE, radius=0)
    yield text(MARGIN / 2 + 350, y + 4, "reliable peer", fill=FAINT)
    if unnamed:
        yield text(MARGIN / 2, y + 28, f"{counted(unnamed, 'name')} left out for want of room", fill=FAINT)
    if pixels:
        seconds = _round(120.0 / pixels)
        x, long = WIDTH - MARGIN / 2, seconds * pixels
        yield f'<line x1="{x - long:.1f}" y1="{y}" x2="{x:.1f}" y2="{y}" stroke="{INK}"/>'
        yield text(x - long - 8, y + 4, f"{_time(seconds)} one way", fill=FAINT, anchor="end")


def _round(seconds: float) -> float:
    """The largest of 1, 2, 5, 10, 20 … ms and their parts that is no more than this."""
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(step * power for step in (5.0, 2.0, 1.0) if step * power <= seconds * (1 + 1e-9))
