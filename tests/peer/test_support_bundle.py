"""What `hetpeer doctor --bundle` writes for others, and above all what it does not."""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path

import pytest

from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.checkup.findings import Finding, Grade
from hetpeer.peer.checkup.support_bundle import redacted, write_bundle
from hetpeer.peer.process.log_files import keeping_log

PEER = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
NAMES = {"/home/ann/peer": "HOME", "/home/ann": "~", "ann": "USER", "box": "HOST"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"none of /ip4/51.51.51.9/tcp/31330/p2p/{PEER}", "none of /ip4/ADDRESS/tcp/31330/p2p/…SupNKC"),
        ("at 8.8.8.8:31330, 192.168.1.7. And 127.0.0.1", "at ADDRESS:31330, PRIVATE-ADDRESS. And 127.0.0.1"),
        ("/ip6/2a00:1450:4001:81b::200e/tcp/1 at 12:04:11", "/ip6/ADDRESS/tcp/1 at 12:04:11"),
        ("/dns4/home.example.org/tcp/1", "/dns4/NAME/tcp/1"),
        (f"join hetpeer://my-run@3f/ip4/8.8.8.8/tcp/1/p2p/{PEER},9f3c1a now", "join INVITE now"),
        ("/home/ann/peer/daemon.log of ann@box", "HOME/daemon.log of USER@HOST"),
        ("channel and box.annex", "channel and HOST.annex"),
        ("version 1.1.12, step 3/20", "version 1.1.12, step 3/20"),
    ],
)
def test_who_and_where_is_taken_out(text: str, said: str) -> None:
    assert redacted(text, NAMES) == said


def test_names_that_are_not_ascii_are_taken_out_as_well(tmp_path: Path) -> None:
    """The log and what was found are JSON, which writes them otherwise."""
    home = tmp_path / "Größe"
    home.mkdir()
    with keeping_log(home):
        logging.getLogger("hetpeer.x").warning("cannot write %s/daemon.log", home)
    error = LocalError("HP-ID-001", f"cannot use {home}/identity.key", why="damaged", fix="restore it")
    write_bundle(tmp_path / "bundle.zip", home, [Finding(check="identity", grade=Grade.FAIL, error=error)])
    with zipfile.ZipFile(tmp_path / "bundle.zip") as archive:
        found = json.loads(archive.read("doctor.json"))["findings"][0]["what"]
        logged = json.loads(archive.read("log.jsonl"))["event"]
    assert (found, logged) == ("cannot use HOME/identity.key", "cannot write HOME/daemon.log")


def test_the_file(tmp_path: Path) -> None:
    home = tmp_path / "secret-home"
    home.mkdir()
    with keeping_log(home):
        logging.getLogger("hetpeer.x").warning("%s/daemon.log, 8.8.8.8, %s", home, PEER)
    error = LocalError("HP-ID-001", f"cannot use {home}/identity.key", why="damaged", fix="restore it")
    path = tmp_path / "bundle.zip"
    write_bundle(path, home, [Finding(check="identity", grade=Grade.FAIL, error=error)])
    assert path.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert list(parts) == ["doctor.json", "log.jsonl", "packages.txt"]
    for text in parts.values():
        assert not any(secret in text for secret in ("secret-home", "8.8.8.8", PEER))
    assert json.loads(parts["doctor.json"])["findings"][0]["what"] == "cannot use HOME/identity.key"
    assert json.loads(parts["log.jsonl"])["event"] == "HOME/daemon.log, ADDRESS, …SupNKC"
    assert "\nhivemind 1.1.12\n" in parts["packages.txt"]
    with pytest.raises(LocalError, match="HP-DISK-001"):
        write_bundle(path, home, [])
    write_bundle(tmp_path / "second.zip", tmp_path / "nowhere", [])  # nobody has kept a log there
