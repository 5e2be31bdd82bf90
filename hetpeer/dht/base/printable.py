"""Text for a terminal. Parts of it come from peers, so none of it may move the cursor or reverse the text."""

from __future__ import annotations

import re

_PEER = re.compile(r"\b(?:Qm[1-9A-HJ-NP-Za-km-z]{44}|12D3KooW[1-9A-HJ-NP-Za-km-z]{44})\b")
SHORT_ID = 6
"""Characters of a peer's id in its short form."""


def short_id(peer: str) -> str:
    """The short form of a peer's id for people, everywhere the same: `…x9fQ2a`. The end of an id will do."""
    return f"…{peer[-SHORT_ID:]}"


def short_ids(text: str) -> str:
    """`text` with every peer id in its short form."""
    return _PEER.sub(lambda found: short_id(found[0]), text)


def escaped(text: str) -> str:
    r"""`text` with escapes such as `\x1b` for control characters, line ends and direction marks."""
    if text.isprintable():
        return text
    return "".join(
        mark if mark.isprintable() else mark.encode("unicode_escape", "surrogatepass").decode()
        for mark in text
    )
