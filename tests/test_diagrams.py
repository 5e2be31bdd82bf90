"""The diagrams in docs/pictures are those that benchmarks/diagrams.py draws."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks.diagrams import DIAGRAMS, FOLDER


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_diagram_is_current(name: str) -> None:
    drawn = DIAGRAMS[name]()
    assert drawn == (FOLDER / name).read_text(), "run python -m benchmarks.diagrams"
    assert ET.fromstring(drawn).tag.endswith("svg")
    assert "prefers-color-scheme: dark" in drawn
