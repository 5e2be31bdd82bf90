"""`docs/cli.md` says what `--help` says."""

from pathlib import Path

import typer

from hetpeer.peer.cli.help_page import GROUPS, page
from hetpeer.peer.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_up_to_date() -> None:
    told = page()
    assert PAGE.read_text() == told, "python -m hetpeer.peer.cli.help_page > docs/cli.md"


def test_every_command_is_on_the_page_once() -> None:
    named = [name for _, names in GROUPS for name in names.split()]
    assert sorted(named) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
