"""Check the subject of a commit message: an area, a colon, and at most 72 characters in all (`dht: …`,
`docs: …`).

python scripts/commit_subject.py .git/COMMIT_EDITMSG
"""

import re
import sys
from pathlib import Path

MOST = 72
SUBJECT = re.compile(r"[a-z][a-z0-9_./-]*(, [a-z][a-z0-9_./-]*)*: \S")
"""One area or several, in lower case."""
OF_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
"""Beginnings that git itself writes."""


def fault(message: str) -> str:
    """What is wrong with the subject of `message`; empty if nothing is."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = next((line.strip() for line in lines if line.strip()), "")
    if subject.startswith(OF_GIT):
        return ""
    if not SUBJECT.match(subject):
        return f"the subject {subject!r} does not begin with an area and a colon, like 'dht: …' or 'docs: …'"
    if len(subject) > MOST:
        return f"the subject has {len(subject)} characters, {MOST} at most"
    return ""


if __name__ == "__main__":
    found = fault(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if found:
        sys.exit(found)
