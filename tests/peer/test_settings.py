"""Where a dashboard is served, as people say it."""

import pytest
import typer
from typer.testing import CliRunner

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.cli.swarm import dashboard_command
from hetpeer.peer.limits.setting_layers import changed
from hetpeer.peer.limits.settings import Settings
from hetpeer.peer.limits.web_address import Where, parse_where


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", Where("127.0.0.1", 8787, or_any=True)),
        ("off", None),
        ("0", Where("127.0.0.1", 0)),
        ("9000", Where("127.0.0.1", 9000)),
        (":9000", Where("127.0.0.1", 9000)),
        ("localhost:9000", Where("localhost", 9000)),
        ("0.0.0.0:9000", Where("0.0.0.0", 9000)),
        ("[::1]:9000", Where("::1", 9000)),
    ],
)
def test_what_people_say(text: str, where: Where | None) -> None:
    assert parse_where(text) == where


@pytest.mark.parametrize(
    "text", ["x", "65536", "-1", "1.5", "²", "example.org:80", "1.2.3:80", ":", "127.0.0.1", "[::1]"]
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(LocalError) as caught:
        parse_where(text)
    assert (caught.value.code, caught.value.exit_code) == ("HP-WEB-002", ExitCode.USAGE)


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_whether_only_this_machine_gets_there(host: str, alone: bool) -> None:
    assert Where(host, 1).is_loopback is alone


def test_a_dashboard_that_is_to_be_nowhere() -> None:
    """For who serves nothing else it is a mistake, whoever made it: the command's user, or the
    environment.
    """
    alone = typer.Typer()
    alone.command()(dashboard_command.dashboard)
    done = CliRunner().invoke(alone, ["--dashboard", "off"])
    assert isinstance(done.exception, LocalError)
    assert done.exception.code == "HP-WEB-002"


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("auto", "auto"),
        ("all", "all"),
        ("cuda:3", "cuda:3"),
        ("cuda:0, cuda:1", "cuda:0,cuda:1"),
        ("cuda,cpu", "cuda,cpu"),
        ("cpu,cpu", "cpu,cpu"),
    ],
)
def test_devices_as_people_say_them(said: str, kept: str) -> None:
    assert changed(Settings(), "compute.device", said, "a test").compute.device == kept


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("cuda:0,cuda:0", "names a GPU twice"),
        ("cuda,cuda:0", "names a GPU twice"),
        ("gpu", "'gpu' is none of"),
        ("auto,cpu", "'auto' stands alone"),
        ("cpu,", "'' is none of"),
        (",".join(["cpu"] * 17), "16 are the most"),
    ],
)
def test_what_names_no_devices(said: str, why: str) -> None:
    with pytest.raises(LocalError, match=r"compute\.device of a test") as caught:
        changed(Settings(), "compute.device", said, "a test")
    assert caught.value.code == "HP-CONF-003"
    assert why in caught.value.why
