"""Every command that README and the guides show exists, with its options; and the commands of the author's
guide, run.

tests/swarm/test_doc_commands.py gives those of the other pages.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from hetpeer.peer.cli.main import app

UsageError = typer.BadParameter.__mro__[1]
ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/volunteers.md",
    "docs/operations.md",
    "docs/authors.md",
    "docs/finetune.md",
    "docs/training.md",
    "docs/machine.md",
    "docs/joining.md",
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(hetpeer [a-z][^`]*)`")
NOTATION = re.compile(r"[|\[\]]|\.\.\.|OPTION")
"""Of a line that says what may be given, and is none itself."""


def fenced(page: str) -> list[str]:
    """The commands in the code blocks of a page, without what is said behind #."""
    blocks = FENCE.findall((ROOT / page).read_text())
    lines = [line.removeprefix("$ ") for _, block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"hetpeer [a-z]", line)]


def shown(page: str) -> Iterator[str]:
    """All of a page, also in its sentences."""
    yield from fenced(page)
    prose = FENCE.sub("", (ROOT / page).read_text())
    yield from (command for command in INLINE.findall(prose) if not NOTATION.search(command))


def words(command: str) -> list[str]:
    return shlex.split(command, comments=True)[1:]


def parsed(arguments: Sequence[str]) -> None:
    """As `hetpeer` would, without doing anything. Raises a usage error."""
    context = typer.main.get_command(app).make_context("hetpeer", list(arguments))
    while isinstance(group := context.command, TyperGroup) and (
        rest := [*context._protected_args, *context.args]
    ):
        name, inner, rest = group.resolve_command(context, rest)
        assert inner is not None
        context = inner.make_context(name, rest, parent=context)
    if context.command_path == "hetpeer service install":
        options = context.params["options"]
        parsed(options if options[0] == "bootstrap" else ["join", *options])


COMMANDS = [(page, command) for page in PAGES for command in dict.fromkeys(shown(page))]


@pytest.mark.parametrize(
    ("page", "command"), COMMANDS, ids=[f"{page}: {command}" for page, command in COMMANDS]
)
def test_a_command_that_is_shown_can_be_given(page: str, command: str) -> None:
    try:
        parsed(words(command))
    except UsageError as error:  # a sentence may speak of one option alone
        if command in fenced(page) or type(error).__name__ != "MissingParameter":
            raise


def test_most_pages_show_some() -> None:
    assert {page for page, _ in COMMANDS} == set(PAGES)
    assert len(fenced("docs/authors.md")) >= 8


@pytest.mark.parametrize(
    "command",
    [
        "hetpeer paint",
        "hetpeer init",
        "hetpeer pause --till 2h",
        "hetpeer invite a b",
        "hetpeer service install --x",
    ],
)
def test_what_is_no_command_is_noticed(command: str) -> None:
    with pytest.raises(UsageError):
        parsed(words(command))


# ── the author's guide ──────────────────────────────────────────────────────────────────────────────────────


def started(folder: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """A daemon of somebody who has `folder`, and a home in it."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HETPEER_HOME": str(folder / "home"),
        "NO_COLOR": "1",
    }
    command = [
        sys.executable,
        "-m",
        "hetpeer.peer.cli.main",
        *arguments,
        "--host",
        "127.0.0.1",
        "--dashboard",
        "off",
    ]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> str:
    """What it said; it must come to a good end."""
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def invite_of(process: subprocess.Popen[str]) -> str:
    """What it prints once it serves."""
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("hetpeer join hetpeer://"):
        assert line, ended(process)
    return line.split()[2]


def followed(page: str, author: Path, volunteers: Sequence[Path]) -> dict[str, str]:
    """Outputs of a page's commands, by their first words, given in their order on one machine.

    Only where `bootstrap` listens and the invite are this test's own.
    """
    said: dict[str, str] = {}
    invite = ""
    daemons: list[subprocess.Popen[str]] = []
    try:
        for command in map(words, fenced(page)):
            arguments = [invite if word.startswith("hetpeer://") else word for word in command]
            if command[0] == "bootstrap":
                daemons.append(started(author, [*arguments, "--port", "0"]))
                invite = invite_of(daemons[0])
            elif command[0] == "join":
                daemons += [started(folder, arguments) for folder in volunteers]
                said["bootstrap"], *joined = map(ended, daemons)
                said["join"] = "".join(joined)
                assert all("finished: " in end for end in (said["bootstrap"], *joined))
            else:
                done = CliRunner().invoke(app, arguments)
                assert done.exit_code == 0, f"{command}: {done.output} {done.exception}"
                said[command[0]] = done.stdout
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.communicate()
    return said


def people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Path]]:
    """The author's folder, which is where commands are given, and those of as many volunteers as stages."""
    author, *volunteers = (tmp_path / name for name in ("author", "one", "other"))
    for folder in (author, *volunteers):
        folder.mkdir(parents=True)
    monkeypatch.chdir(author)
    monkeypatch.setenv("HETPEER_HOME", str(author / "home"))
    return author, volunteers


@pytest.mark.proof
@pytest.mark.swarm
def test_the_authors_guide_from_a_module_to_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "authors.md").read_text()
    ((_, module),) = [block for block in FENCE.findall(page) if block[0] == "python"]
    author, volunteers = people(tmp_path, monkeypatch)
    (author / "corpus").mkdir()
    (author / "tiny.py").write_text(module)
    shutil.copy(ROOT / "docs" / "protocol.md", author / "corpus")
    said = followed("docs/authors.md", author, volunteers)
    assert "20 steps" in said["init"]
    assert "state     waiting: " in said["status"]
    assert "equal to the last bit" in said["audit"]  # with --replay, which comes last
    assert "verdict       exactly once" in said["audit"]
    assert said["generate"].startswith("the ")
    assert (author / "weights.safetensors").stat().st_size > 100_000


@pytest.mark.proof
@pytest.mark.swarm
def test_a_model_of_transformers_is_fine_tuned_as_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.bootstrap.pretrained_models import llama
    from tests.bootstrap.written_data import CHATS, written

    page = (ROOT / "docs" / "finetune.md").read_text()
    ((_, program),) = [block for block in FENCE.findall(page) if block[0] == "python"]
    author, volunteers = people(tmp_path, monkeypatch)
    llama(author / "model", torch.bfloat16)
    written(author / "chats.jsonl", CHATS * 10, "messages")
    said = followed("docs/finetune.md", author, volunteers)
    assert "10 steps" in said["init"]
    assert "after 10 of 10 committed steps" in said["export"]
    assert said["generate"].startswith("Where is the fox?\n")
    loaded: dict[str, Any] = {}
    exec(program, loaded)  # the page's own lines
    before = AutoModelForCausalLM.from_pretrained(author / "model", dtype=torch.float32).state_dict()
    changed = [
        name for name, tensor in loaded["model"].state_dict().items() if (tensor != before[name]).any()
    ]
    assert len(changed) == sum("proj" in name for name in before)  # the layers that have adapters
    assert (author / "adapter" / "adapter_model.safetensors").is_file()
    assert loaded["tokenizer"].chat_template
