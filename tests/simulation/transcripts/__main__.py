"""Transcripts of simulated histories: `python -m tests.simulation.transcripts --write` rewrites them, without
it they are printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.simulation.transcripts.stories import STORIES

FOLDER = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite the files beside this one")
    parser.add_argument("stories", nargs="*", help="names or parts of names (default: all)")
    options = parser.parse_args()
    for name, story in STORIES.items():
        if options.stories and not any(part in name for part in options.stories):
            continue
        if options.write:
            (FOLDER / f"{name}.txt").write_text(story.told())
        else:
            print(f"=== {name}\n{story.told()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
