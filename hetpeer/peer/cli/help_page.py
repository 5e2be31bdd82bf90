"""`docs/cli.md`, made from the help texts of the commands: `python -m hetpeer.peer.cli.help_page >
docs/cli.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import typer

HEAD = """\
# Command line

`hetpeer COMMAND -h` shows the same text. `-v`, `-vv` and `-q` stand before the command (`hetpeer -v join …`):
more messages, all messages, errors only. Errors have codes, which [errors.md](errors.md) explains. This page
is made from the help texts by `python -m hetpeer.peer.cli.help_page > docs/cli.md`.
"""
GROUPS = (
    (
        "Contribute a machine",
        "join pause resume finish stop status logs doctor bench dashboard config service id",
    ),
    ("Make and serve a run", "init inspect bootstrap invite amend watch audit export generate chat"),
    ("Plan and try out", "demo plan simulate trace"),
)
"""Headings → the commands below them, in the order of the page."""


def page() -> str:
    """The text of docs/cli.md."""
    from hetpeer.peer.cli.main import app

    return "\n".join(_lines(typer.main.get_command(app)))


def _lines(root: Any) -> Iterator[str]:
    with root.make_context("hetpeer", [], resilient_parsing=True) as context:
        yield HEAD
        for heading, names in GROUPS:
            yield f"## {heading}\n"
            for name in names.split():
                yield from _command(root.resolve_command(context, [name])[1], f"hetpeer {name}")


def _command(command: Any, name: str) -> Iterator[str]:
    """A command, and the commands below it, each with its arguments and options."""
    with command.make_context(name, [], resilient_parsing=True) as context:
        usage = " ".join((name, *command.collect_usage_pieces(context)))
        yield f"### `{usage}`\n"
        yield f"{_prose(command.help or '')}\n"
        rows = [row for one in command.params if (row := one.get_help_record(context)) is not None]
        if rows:
            yield "| | |"
            yield "| --- | --- |"
            for option, meaning in rows:
                yield f"| `{_cell(option)}` | {_cell(_prose(meaning))} |"
            yield ""
        for inner in getattr(command, "commands", {}).values():
            yield from _command(inner, f"{name} {inner.name}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _prose(text: str) -> str:
    """Paragraphs of one line each."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


if __name__ == "__main__":
    sys.stdout.write(page())
