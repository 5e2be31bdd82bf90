"""`hetpeer invite`, as typed: from what the run's directory keeps, and what it says where nothing is kept."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
import segno
from typer.testing import CliRunner

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.addresses import EXAMPLE, at_socket, parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.reach.reachability import ROUND_S, ReachFinding
from hetpeer.peer.arrival.destinations import MAX_LENGTH, make_invite, parse_invite
from hetpeer.peer.arrival.invite_file import Inviting, keep, new_invite
from hetpeer.peer.arrival.rendezvous import near_address
from hetpeer.peer.cli import main
from hetpeer.peer.cli.author.invite_command import draw
from tests.bootstrap.engine import make_run

PEER = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
HERE, MEETING = at_socket("8.8.8.8", 31330, PEER), parse_address(EXAMPLE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("run"))


def hetpeer_invite(run: RunDirectory, *arguments: str) -> str:
    result = CliRunner().invoke(main.app, ["invite", str(run.path), *arguments])
    if isinstance(result.exception, LocalError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_is_printed_again_with_more_addresses_before_its_own(run: RunDirectory) -> None:
    invite = keep(run, new_invite(run, [HERE], [MEETING]))
    assert hetpeer_invite(run) == f"{invite}\n"
    assert (invite.run, invite.addresses) == (run.run_id, (HERE, MEETING))
    run.named_path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("9.9.9.9:31330", "/ip4/9.9.9.9/tcp/31330/p2p/ID"),
        ("[2001:db8::1]:31330", "/ip6/2001:db8::1/tcp/31330/p2p/ID"),
        ("example.org:31330", "/dns/example.org/tcp/31330/p2p/ID"),
        ("/ip4/9.9.9.9/tcp/4", "/ip4/9.9.9.9/tcp/4/p2p/ID"),
        (f"/ip4/9.9.9.9/tcp/4/p2p/{PEER}", f"/ip4/9.9.9.9/tcp/4/p2p/{PEER}"),
    ],
)
def test_what_its_author_names_stands_first_from_then_on(run: RunDirectory, said: str, meant: str) -> None:
    """Whoever says where his own machine is reached need not know its id."""
    keep(run, new_invite(run, [HERE], [MEETING]))
    named = parse_address(meant.replace("ID", Identity.load(run.identity_path).peer_id))
    assert parse_invite(hetpeer_invite(run, "--bootstrap", said)).addresses == (named, HERE, MEETING)
    assert parse_invite(hetpeer_invite(run, "--qr").splitlines()[-1]).addresses[0] == named
    assert new_invite(run, [HERE], []).addresses == (named, HERE), "also when it is served again"
    served = keep(run, new_invite(run, [HERE], [MEETING]))
    assert served.addresses[0] == named
    assert parse_invite(hetpeer_invite(run, "--bootstrap", "7.7.7.7:7")).addresses[1:] == (HERE, MEETING)
    assert parse_invite(hetpeer_invite(run, "--bootstrap", "")).addresses == (HERE, MEETING)


@pytest.mark.parametrize("said", ["9.9.9.9", "example.org", "nowhere at all", "9.9.9.9:port", "[::1:4"])
def test_what_is_no_address_is_refused(run: RunDirectory, said: str) -> None:
    with pytest.raises(LocalError) as caught:
        hetpeer_invite(run, "--bootstrap", said)
    assert caught.value.code == "HP-ADDR-001"
    assert "HOST:PORT" in caught.value.fix


async def test_what_a_router_forwards_stands_first_once_others_have_come_that_way(
    run: RunDirectory, tmp_path: Path
) -> None:
    """What two of them have found, given to the node that was not asked for anything else."""
    node = await Node.start(NodeConfig(alone_ok=True), Identity.create(tmp_path / "identity.key"))
    try:
        inviting = Inviting(node, run, [MEETING])
        first = inviting.renewed()
        assert first is not None
        assert first.addresses == (parse_address(node.addresses()[0]), MEETING)
        assert inviting.renewed() is None
        core = node._sessions.reaching.core
        core.met(time.monotonic(), ["a", "b"])
        core.answered(time.monotonic(), "a", ReachFinding(helper="a", ip="8.8.8.8", port=4001))
        core.tick(time.monotonic() + ROUND_S)
        assert node.reach_estimate.outside
        assert inviting.renewed() is None, "one of them may lie"
        core.met(time.monotonic(), ["a", "b", "c"])
        core.answered(time.monotonic(), "c", ReachFinding(helper="c", ip="8.8.8.8", port=4001))
        renewed = inviting.renewed()
        assert renewed is not None
        there = at_socket("8.8.8.8", 4001, node.peer_id)
        assert renewed.addresses[0] == parse_address(node.addresses()[0]) == there
        assert parse_invite(hetpeer_invite(run)) == renewed
        assert parse_address(near_address(node)) == first.addresses[0]
        assert inviting.renewed() is None
    finally:
        await node.close()


@pytest.mark.parametrize("content", [None, "", "hetpeer://", str(make_invite("x", "0" * 32, [HERE]))])
def test_without_a_sound_one_an_address_must_be_said(run: RunDirectory, content: str | None) -> None:
    run.invite_path.unlink(missing_ok=True)
    if content is not None:
        run.invite_path.write_text(content)
    with pytest.raises(LocalError) as caught:
        hetpeer_invite(run)
    assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-017", ExitCode.CONFIG)
    invite = parse_invite(hetpeer_invite(run, "--bootstrap", str(MEETING)))
    assert (invite.run, invite.addresses) == (run.run_id, (MEETING,))
    run.named_path.unlink()


def test_the_code_is_drawn_in_half_blocks_and_the_link_follows(run: RunDirectory) -> None:
    link = str(keep(run, new_invite(run, [HERE], [])))
    *code, last = hetpeer_invite(run, "--qr").splitlines()
    assert last == link
    halves = {" ": (1, 1), "▄": (1, 0), "▀": (0, 1), "█": (0, 0)}
    rows = [row for line in code for row in zip(*(halves[block] for block in line), strict=True)]
    expected = [tuple(row) for row in segno.make_qr(link, error="l").matrix_iter(border=2)]
    assert rows[: len(expected)] == expected
    assert all(set(row) == {1} for row in rows[len(expected) :])
    assert max(map(len, code)) <= 80


def test_a_terminal_is_told_the_colours_and_the_longest_invite_fits_a_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), io.StringIO()
    draw("a" * MAX_LENGTH, coloured)
    draw("a" * MAX_LENGTH, plain)
    stripped = coloured.getvalue().replace("\x1b[97;40m", "").replace("\x1b[0m", "")
    assert stripped == plain.getvalue()
    assert "\x1b" not in plain.getvalue()
    assert all(line.endswith("\x1b[0m") for line in coloured.getvalue().splitlines())


@pytest.mark.parametrize(
    ("arguments", "why"), [(("--uses", "5"), "everybody may join"), (("--expires", "1d"), "give --uses")]
)
def test_limits_that_nobody_would_enforce_are_not_promised(
    run: RunDirectory, arguments: tuple[str, ...], why: str
) -> None:
    keep(run, new_invite(run, [HERE], []))
    result = CliRunner().invoke(main.app, ["invite", str(run.path), *arguments])
    assert result.exit_code == ExitCode.USAGE
    assert why in " ".join(result.output.replace("│", " ").split())
