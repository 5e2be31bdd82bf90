"""Draw the diagrams of docs/architecture.md: `python -m benchmarks.diagrams` writes docs/pictures/*.svg.

The same bytes each time; tests/test_diagrams.py compares them with the files. Colours follow the reader's
light or dark theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
LINE_PX = 17
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; }
  .label { font-size: 12px; fill: #57606a; }
  .box { fill: #f6f8fa; stroke: #57606a; }
  .outer { fill: none; stroke: #57606a; stroke-dasharray: 5 4; }
  .arrow { stroke: #0969da; stroke-width: 1.5; fill: none; }
  .head { fill: #0969da; }
  .paper { fill: #ffffff; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .label { fill: #9198a1; }
    .box { fill: #161b22; stroke: #9198a1; }
    .outer { stroke: #9198a1; }
    .arrow { stroke: #58a6ff; }
    .head { fill: #58a6ff; }
    .paper { fill: #0d1117; }
  }
"""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with its first line in bold; pixels from the top left corner.

    `dashed`: a group around others.
    """

    x: int
    y: int
    width: int
    height: int
    lines: Sequence[str]
    dashed: bool = False

    def drawn(self) -> str:
        kind = "outer" if self.dashed else "box"
        rows = [
            (
                f'<rect class="{kind}" x="{self.x}" y="{self.y}" '
                f'width="{self.width}" height="{self.height}" rx="6"/>'
            )
        ]
        for number, line in enumerate(self.lines):
            cls = "label" if number else "title"
            y = self.y + 20 + number * LINE_PX
            rows.append(f'<text class="{cls}" x="{self.x + 10}" y="{y}">{escape(line)}</text>')
        return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow through two or more points; its label stands at `label_at`. `both`: a head at each end."""

    points: Sequence[tuple[int, int]]
    label: str = ""
    label_at: tuple[int, int] = (0, 0)
    both: bool = False

    def drawn(self) -> str:
        start = ' marker-start="url(#head)"' if self.both else ""
        path = "M" + " L".join(f"{x} {y}" for x, y in self.points)
        drawn = f'<path class="arrow" d="{path}"{start} marker-end="url(#head)"/>'
        if self.label:
            x, y = self.label_at
            drawn += f'\n<text class="label" x="{x}" y="{y}">{escape(self.label)}</text>'
        return drawn


def document(width: int, height: int, title: str, parts: Sequence[Box | Arrow]) -> str:
    """The SVG; `title` is read to people who do not see it."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}"'
        f' role="img" aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n'
        '<defs><marker id="head" markerWidth="9" markerHeight="9" refX="8" refY="4.5"'
        ' orient="auto-start-reverse">'
        '<path class="head" d="M0 0 L9 4.5 L0 9 z"/></marker></defs>\n'
        f'<rect class="paper" width="{width}" height="{height}"/>\n'
    )
    return head + "\n".join(part.drawn() for part in parts) + "\n</svg>\n"


def processes() -> str:
    """A volunteer's processes."""
    return document(
        840,
        430,
        "A volunteer's processes: daemon, p2pd, compute worker, arena and spill file",
        [
            Box(10, 16, 620, 404, ["One volunteer's machine"], dashed=True),
            Box(
                30,
                50,
                270,
                126,
                ["daemon (hetpeer join)", "asyncio + uvloop, no torch", "DHT node, channels"],
            ),
            Box(45, 126, 240, 40, ["protocol cores: events in, effects out"]),
            Box(30, 250, 270, 60, ["p2pd", "libp2p host, started by the daemon"]),
            Box(
                390,
                50,
                220,
                126,
                [
                    "compute worker",
                    "torch, sandboxed, low priority",
                    "one thread each to",
                    "compute, send, receive",
                ],
            ),
            Box(390, 250, 220, 60, ["arena", "one memfd mapped by both"]),
            Box(390, 334, 220, 50, ["spill file", "what memory has no room for"]),
            Box(680, 150, 150, 60, ["other volunteers", "tensors, messages"]),
            Box(680, 250, 150, 60, ["reliable peers", "coordinator, files"]),
            Arrow([(300, 90), (390, 90)], "commands", (312, 82), both=True),
            Arrow([(300, 160), (420, 250)], "tensors", (300, 222), both=True),
            Arrow([(500, 176), (500, 250)], "tensors", (508, 218), both=True),
            Arrow([(165, 176), (165, 250)], "streams", (173, 218), both=True),
            Arrow([(500, 310), (500, 334)], both=True),
            Arrow(
                [(165, 310), (165, 402), (755, 402), (755, 310)], "encrypted streams", (173, 394), both=True
            ),
            Arrow([(285, 50), (285, 32), (755, 32), (755, 150)], "direct TLS streams", (648, 50), both=True),
        ],
    )


def step() -> str:
    """One step, from the first microbatch to the applied update."""
    return document(
        840,
        470,
        "One step: begin, microbatches, reduce, vote, commit, apply",
        [
            Box(
                20,
                20,
                800,
                58,
                [
                    "coordinator",
                    "hands out microbatch ids, counts sealed gradient slots: exact cover of every block",
                ],
            ),
            Box(20, 150, 170, 76, ["volunteer A", "blocks 0-2", "makes the microbatch"]),
            Box(335, 150, 170, 76, ["volunteer B", "blocks 3-5"]),
            Box(650, 150, 170, 76, ["volunteer C", "blocks 6-7", "computes the loss"]),
            Arrow([(70, 78), (70, 150)], "1 Begin", (78, 118)),
            Arrow([(190, 175), (335, 175)], "activation", (220, 168)),
            Arrow([(505, 175), (650, 175)], "activation", (535, 168)),
            Arrow([(335, 208), (190, 208)], "gradient", (225, 224)),
            Arrow([(650, 208), (505, 208)], "gradient", (540, 224)),
            Arrow([(735, 150), (735, 78)], "4 Sealed: slot, ids, losses", (570, 118)),
            Box(
                20,
                300,
                800,
                76,
                [
                    "5 reduce: for every block",
                    "the plan names holders and slots; holders send shards of their slots to reducers,",
                    (
                        "reducers add them up in the plan's order and send the result to all holders of the "
                        "block"
                    ),
                ],
            ),
            Arrow([(105, 226), (105, 300)]),
            Arrow([(420, 226), (420, 300)], "slots", (428, 268)),
            Arrow([(735, 226), (735, 300)]),
            Box(20, 410, 250, 44, ["6 vote: all holders of all blocks"]),
            Box(295, 410, 250, 44, ["7 COMMIT: durable in the log"]),
            Box(570, 410, 250, 44, ["8 apply: the next version"]),
            Arrow([(145, 376), (145, 410)]),
            Arrow([(270, 432), (295, 432)]),
            Arrow([(545, 432), (570, 432)]),
        ],
    )


DIAGRAMS = {"processes.svg": processes, "step.svg": step}


def main() -> None:
    """Write every diagram."""
    for name, draw in DIAGRAMS.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()
