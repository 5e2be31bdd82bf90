"""The transcripts are what happens, word by word; `python -m tests.simulation.transcripts --write` rewrites
them.
"""

import pytest

from tests.simulation.transcripts.__main__ import FOLDER
from tests.simulation.transcripts.scribe import WIDTH
from tests.simulation.transcripts.stories import MOST_LINES, STORIES


@pytest.mark.parametrize("name", STORIES)
def test_a_transcript_is_what_happens(name):
    assert STORIES[name].told() == (FOLDER / f"{name}.txt").read_text(), "look at the diff of --write"


def test_transcripts_are_short_enough_to_be_read():
    texts = {path.stem: path.read_text() for path in FOLDER.glob("*.txt")}
    assert texts.keys() == STORIES.keys()
    for name, text in texts.items():
        lines = text.splitlines()
        assert len(lines) <= MOST_LINES, name
        assert max(map(len, lines)) <= WIDTH, name
