"""Text as a terminal may show it: some of what is told comes from peers, so nothing of it may move a cursor or turn text around."""

from __future__ import annotations


def escaped(text: str) -> str:
    r"""`text` with `\x1b` for what is no character that is printed: control characters, line ends, marks of direction."""
    if text.isprintable():
        return text
    return "".join(
        mark if mark.isprintable() else mark.encode("unicode_escape", "surrogatepass").decode()
        for mark in text
    )
