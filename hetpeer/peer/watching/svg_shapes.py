"""The few SVG elements that pictures are made of, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

INK, FAINT, LINE, PAPER = "#24292f", "#6e7781", "#8c959f", "#ffffff"


def short(words: str, length: int) -> str:
    """`words` cut to at most `length` characters."""
    return words if len(words) <= length else f"{words[: length - 1]}…"


def document(width: float, height: float, body: Iterable[str]) -> str:
    """The whole picture."""
    size = f'width="{width:.0f}" height="{height:.0f}"'
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" role="img"'
    font = 'font-family="DejaVu Sans, Verdana, sans-serif" font-size="11"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} {font}>',
        f'<rect {size} fill="{PAPER}"/>',
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(
    x: float,
    y: float,
    words: str,
    *,
    fill: str = INK,
    anchor: str = "start",
    size: int = 11,
    weight: str = "normal",
    more: str = "",
) -> str:
    """A text element at (x, y); `more`: further attributes."""
    look = f'fill="{fill}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}{more}>{escape(words)}</text>'


def rect(
    x: float, y: float, width: float, height: float, *, fill: str, stroke: str, radius: int, hint: str = ""
) -> str:
    """A rectangle with rounded corners; `hint`: its tooltip."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}"><title>{escape(hint)}</title></rect>'


def arrow(points: Sequence[tuple[float, float]], hint: str, *, colour: str = LINE, wide: bool = False) -> str:
    """Lines from point to point with a head at the end; `hint` shows under the pointer."""
    (before_x, _), (x, y) = points[-2:]
    size = 5 if wide else 3.5
    if before_x == x:  # downwards
        head = [(x - size, y - 1.5 * size), (x + size, y - 1.5 * size)]
    else:
        back = 1.5 * size if before_x > x else -1.5 * size
        head = [(x + back, y - size), (x + back, y + size)]
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    tip = " ".join(f"{px:.1f},{py:.1f}" for px, py in [(x, y), *head])
    return (
        f'<g class="edge"><title>{escape(hint)}</title>'
        f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{3 if wide else 1.2}"/>'
        f'<polygon points="{tip}" fill="{colour}"/></g>'
    )
