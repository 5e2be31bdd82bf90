"""`hetpeer doctor`: what figures mean, each fault made for real where a test may make it, and peers that
answer or do not.

`hetpeer bench`: figures of this machine, and what is said of what it cannot do.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hetpeer.dht.base.errors import ExitCode, HetpeerError, LocalError
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.reach.reachability import ReachEstimate, ReachKind
from hetpeer.peer.arrival.destinations import Destination
from hetpeer.peer.checkup import examination, local_checks, machine_speeds, thresholds
from hetpeer.peer.checkup.findings import Finding, Grade, document, exit_code, summary
from hetpeer.peer.checkup.local_checks import Owner
from hetpeer.peer.checkup.machine_speeds import MeasuredSpeed
from hetpeer.peer.checkup.thresholds import GIB, MIB, Verdict
from hetpeer.peer.cli.main import app
from hetpeer.peer.control.control_messages import DaemonStatus as Answer
from hetpeer.peer.control.owned_daemon import serving
from hetpeer.peer.daemon import systemd_units
from hetpeer.peer.limits.node_rates import told
from hetpeer.peer.limits.nvml import Gpus
from hetpeer.peer.limits.setting_layers import changed
from hetpeer.peer.limits.settings import Settings
from hetpeer.peer.training.volunteer_figures import MainMemory
from hetpeer.stages.block.device import measure_flops
from hetpeer.stages.pipeline.place_memory import Offered, kinds_of
from tests.dht.peer_process import ChildPeer

FITTING = {"hetpeer": "0.1.0", "torch": "2.13.0", "hivemind": thresholds.HIVEMIND}
LINUX = thresholds.PLATFORM
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"


def outcome(look: Callable[[], Verdict]) -> tuple[Grade, str]:
    """How bad it is, and the text or the code."""
    try:
        verdict = look()
    except LocalError as error:
        return Grade.FAIL, error.code
    return (Grade.OK, verdict) if isinstance(verdict, str) else (Grade.WARN, verdict.code)


@pytest.mark.parametrize(
    ("look", "grade", "said"),
    [
        (lambda: thresholds.software((3, 11, 7), LINUX, FITTING), "ok", "Python 3.11.7, hetpeer 0.1.0"),
        (lambda: thresholds.software((3, 10, 2), LINUX, FITTING), "fail", "HP-SYS-001"),
        (lambda: thresholds.software((3, 12, 0), "Darwin arm64", FITTING), "fail", "HP-SYS-001"),
        (lambda: thresholds.software((3, 11, 7), LINUX, FITTING | {"torch": ""}), "fail", "HP-SYS-001"),
        (
            lambda: thresholds.software((3, 11, 7), LINUX, FITTING | {"hivemind": "1.1.11"}),
            "warn",
            "HP-SYS-001",
        ),
        (lambda: thresholds.memory(8 * GIB, 16 * GIB, 4), "ok", "8 GiB of 16 GiB are free; 4 "),
        (lambda: thresholds.memory(GIB, 16 * GIB, 4), "warn", "HP-MEM-003"),
        (lambda: thresholds.memory(799 * MIB, GIB, 1), "fail", "HP-MEM-003"),
        (lambda: thresholds.disk(5 * GIB, "/home"), "ok", "/home has room for 5 GiB"),
        (lambda: thresholds.disk(GIB, "/home"), "warn", "HP-DISK-004"),
        (lambda: thresholds.disk(MIB, "/home"), "fail", "HP-DISK-004"),
        (lambda: thresholds.open_files(-1, -1), "ok", "no limit on open files"),
        (lambda: thresholds.open_files(1024, 4096), "ok", "up to 1,024 files"),
        (lambda: thresholds.open_files(256, -1), "warn", "HP-SYS-002"),
        (lambda: thresholds.open_files(64, 64), "fail", "HP-SYS-002"),
        (lambda: thresholds.clock(True), "ok", "synchronised by a time server"),
        (lambda: thresholds.clock(False), "warn", "HP-SYS-003"),
        (lambda: thresholds.clock(None), "warn", "HP-SYS-003"),
        (lambda: thresholds.idle({"X11": 61.5}, "idle"), "ok", "known: X11 says 62 s"),
        (lambda: thresholds.idle({}, "always"), "ok", "not known on this machine; only when.mode = idle"),
        (lambda: thresholds.idle({}, "idle"), "fail", "HP-SYS-007"),
        (lambda: thresholds.battery(None, "pause"), "ok", "no battery is known"),
        (lambda: thresholds.battery(True, "pause"), "ok", "on battery now: a volunteer pauses"),
        (lambda: thresholds.battery(False, "run"), "ok", "on mains; on battery a volunteer works on"),
    ],
)
def test_what_figures_mean(look: Callable[[], Verdict], grade: str, said: str) -> None:
    found, text = outcome(look)
    assert (found, text[: len(said)]) == (grade, said)


@pytest.mark.parametrize(
    ("gpus", "torch", "on_cpu", "grade", "said"),
    [
        (Gpus(), "2.13.0+cpu", True, "ok", "no NVIDIA GPU; a processor core computes 9 GFLOP/s"),
        (Gpus(driver="580", names=("A10",)), "2.13.0", False, "ok", "A10, 9 GFLOP/s in float32, driver 580"),
        (Gpus(driver="580", names=("A10",)), "2.13.0+cpu", True, "warn", "was built without CUDA"),
        (Gpus(driver="470", names=("A10",)), "2.13.0", True, "warn", "finds no device that fits the driver"),
        (Gpus(wrong="Driver/library version mismatch"), "2.13.0", True, "warn", "mismatch"),
    ],
)
def test_the_gpu_or_why_there_is_none(gpus: Gpus, torch: str, on_cpu: bool, grade: str, said: str) -> None:
    found = thresholds.device("A10", on_cpu=on_cpu, speed="9 GFLOP/s", torch=torch, gpus=gpus)
    assert isinstance(found, str) == (grade == "ok")
    if isinstance(found, HetpeerError):
        assert found.code == "HP-GPU-004"
        assert said in found.why
    else:
        assert said in found


@pytest.mark.parametrize(
    ("offered", "said"),
    [
        (
            Offered(device=32 * GIB, disk=28 * GIB, kinds=kinds_of("auto")),
            "28 GiB of disk: for at most 1.43 B parameters (optimizer in memory) or 940 M parameters (opt",
        ),
        (
            Offered(device=8 * GIB, host=24 * GIB, disk=0, kinds=kinds_of("host")),
            "0 B of disk: for at most 920 M parameters (optimizer in main",
        ),
        (Offered(device=32 * GIB, kinds=kinds_of("host")), "1.07 B parameters (optimizer in memory)"),
    ],
)
def test_what_a_machine_could_hold(offered: Offered, said: str) -> None:
    main = MainMemory(limit=30 * GIB, program=2 * GIB)
    found = str(thresholds.place(main, offered))
    assert said in found
    assert "(of 30 GiB the program itself takes 2 GiB)" in found


def test_others_reach_us_or_not() -> None:
    def found(where: ReachKind, **fields: object) -> Verdict:
        return thresholds.reach(ReachEstimate(reach=where, peers=2, ip="192.0.2.7", **fields))  # type: ignore[arg-type]

    assert found(ReachKind.PUBLIC, outside=True) == "others reach this machine at 192.0.2.7 (2 peers tried)"
    assert "its own network" in str(found(ReachKind.PUBLIC))
    closed, unknown = found(ReachKind.PRIVATE), found(ReachKind.UNKNOWN)
    assert isinstance(closed, HetpeerError)
    assert isinstance(unknown, HetpeerError)
    assert (closed.code, unknown.code) == ("HP-NET-015", "HP-NET-014")


def test_the_exit_status_is_that_of_the_first_failure() -> None:
    few = LocalError("HP-SYS-002", "few", why="a limit", fix="raise it", exit_code=ExitCode.CONFIG)
    little = LocalError("HP-MEM-003", "little", why="full", fix="close some", exit_code=ExitCode.TOO_SMALL)
    found = [
        Finding(check="files", grade=Grade.WARN, error=few),
        Finding(check="memory", grade=Grade.FAIL, error=little),
        Finding(check="files", grade=Grade.FAIL, error=few),
    ]
    assert exit_code(found) == ExitCode.TOO_SMALL
    assert summary(found) == "2 failures, 1 warning"
    assert exit_code(found[:1]) == ExitCode.OK
    passed = Finding(check="files", grade=Grade.OK, text="many")
    skipped = Finding(check="peers", grade=Grade.SKIP, text="none")
    assert summary([passed, skipped]) == "nothing is wrong"
    assert found[1].line() == "fail  memory     HP-MEM-003: little; why: full; do: close some"
    (row,) = document(found[1:2])["findings"]
    assert row == {
        "check": "memory",
        "grade": "fail",
        "what": "little",
        "code": "HP-MEM-003",
        "why": "full",
        "fix": "close some",
    }


def test_settings_in_force_and_where_each_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text('[limits]\nup = "5mbit"\n')
    monkeypatch.setenv("HETPEER_WHEN_MODE", "idle")
    grade, said = outcome(lambda: local_checks.settings(Owner.of(tmp_path)))
    assert grade is Grade.OK
    assert f"limits.up 5mbit ({tmp_path}/config.toml)" in said
    assert "when.mode idle (the environment's HETPEER_WHEN_MODE)" in said
    assert said.endswith("; hetpeer config show lists them all")
    assert "limits.ram" not in said
    assert Owner.of(tmp_path).value("when.mode") == "idle"
    (tmp_path / "config.toml").write_text('[limits]\nup = "fast"\n')
    assert outcome(lambda: local_checks.settings(Owner.of(tmp_path))) == (Grade.FAIL, "HP-CONF-003")
    assert outcome(lambda: local_checks.port(Owner.of(tmp_path)))[0] is Grade.OK, (
        "the others are looked at all the same"
    )


async def test_those_of_a_volunteer_that_runs_count(tmp_path: Path) -> None:
    """Whatever file and environment would say to the next one; and its port is no port that is taken."""
    running = changed(changed(Settings(), "limits.up", "9mbit", ""), "network.port", "4711", "")
    standing = Answer(
        state="training",
        since=1.0,
        addresses=("/ip4/127.0.0.1/tcp/4711/p2p/Qm",),
        settings=told(running, {"limits.up": "the command line"}),
    )
    (tmp_path / "config.toml").write_text('[limits]\nup = "5mbit"\n')
    async with serving(tmp_path, lambda _request: standing):
        found = await asyncio.to_thread(Owner.of, tmp_path)
    assert "limits.up 9mbit (the command line)" in outcome(lambda: local_checks.settings(found))[1]
    assert outcome(lambda: local_checks.port(found)) == (
        Grade.OK,
        "the running volunteer listens at /ip4/127.0.0.1/tcp/4711/p2p/Qm",
    )
    assert found.port == 0, "another node cannot listen there"


def test_a_port_that_is_taken_and_one_that_is_free(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        number = server.getsockname()[1]
        (tmp_path / "config.toml").write_text(f"[network]\nport = {number}\n")
        assert outcome(lambda: local_checks.port(Owner.of(tmp_path))) == (Grade.FAIL, "HP-NET-001")
    grade, said = outcome(lambda: local_checks.port(Owner.of(tmp_path)))
    assert (grade, said) == (Grade.OK, f"network.port {number}: free")


def test_looking_at_a_home_changes_nothing_in_it(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "home"
    assert outcome(lambda: local_checks.folder(home))[0] in (Grade.OK, Grade.WARN)
    assert outcome(lambda: local_checks.identity(home)) == (
        Grade.OK,
        "none yet; hetpeer join makes one",
    )
    assert outcome(lambda: local_checks.daemon(home)) == (Grade.OK, "no volunteer runs from this home")
    assert [*tmp_path.iterdir()] == []


def test_a_home_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    assert outcome(lambda: local_checks.folder(tmp_path / "home")) == (Grade.FAIL, "HP-DISK-001")


def test_a_service_that_ends_with_its_users_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert outcome(local_checks.service)[0] is Grade.OK
    systemd_units.unit_path().parent.mkdir(parents=True)
    systemd_units.unit_path().write_text(systemd_units.unit_text(["true"]))
    (tmp_path / "loginctl").write_text("#!/bin/sh\necho Linger=no\n")
    (tmp_path / "loginctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert outcome(local_checks.service) == (Grade.WARN, "HP-SVC-003")


def test_a_sandbox_without_shared_memory() -> None:
    code = """
import resource
from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.checkup import local_checks
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # the kernel counts such memory as a file
try:
    local_checks.shared_memory()
except LocalError as error:
    print(error)
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.startswith("HP-SYS-004: ")


def doctor(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetpeer.peer.cli.main", "doctor", "--home", str(home), *arguments]
    environment = {**os.environ, "PYTHONPATH": ".", "NO_COLOR": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.swarm
def test_the_command_on_this_machine(tmp_path: Path) -> None:
    done = doctor(tmp_path / "home", "--json", "--bundle", str(tmp_path / "bundle.zip"))
    findings = {row["check"]: row for row in json.loads(done.stdout)["findings"]}
    assert list(findings) == [
        *("software", "memory", "sharing", "files", "clock", "home", "identity", "daemon", "service"),
        *("settings", "port", "idle", "battery"),
        *("network", "peers", "device", "place"),
    ]  # fmt: skip
    for check in ("software", "sharing", "identity", "daemon", "network"):
        assert (findings[check]["grade"], findings[check]["code"]) == ("ok", None), findings[check]
    assert findings["peers"]["grade"] == "skip"
    assert "FLOP/s" in findings["device"]["what"] or findings["device"]["code"] == "HP-GPU-004"
    assert done.returncode == 0
    assert done.stderr.startswith(f"{tmp_path}/bundle.zip: addresses and names are removed")
    assert not (tmp_path / "home").exists()


@pytest.mark.proof
@pytest.mark.swarm
def test_the_command_with_a_key_that_all_can_read_and_a_peer_that_is_gone(tmp_path: Path) -> None:
    Identity.create(tmp_path / "identity.key")
    (tmp_path / "identity.key").chmod(0o644)
    done = doctor(tmp_path, "--bootstrap", NOBODY)
    lines = {line[6:17].strip(): line for line in done.stdout.splitlines()}
    assert lines["identity"].startswith("fail  identity   HP-ID-001: ")
    assert lines["peers"].startswith("fail  peers      HP-NET-002: ")
    assert "chmod 600" in lines["identity"]
    assert lines["device"].startswith(("ok ", "warn"))  # the others are looked at all the same
    assert done.stdout.splitlines()[-1].startswith("2 failures")
    assert (done.returncode, done.stderr) == (ExitCode.IDENTITY, "")


@pytest.mark.swarm
@pytest.mark.xdist_group("dht-network")
async def test_a_peer_that_answers_and_dials_back(tmp_path: Path) -> None:
    async with ChildPeer(tmp_path / "child") as child:
        goal = Destination((parse_address(child.report["addresses"][0]),))
        found = {finding.check: finding async for finding in examination.meet(goal, "0.0.0.0", 0)}
    assert found["peers"].text.startswith("it answers; the clocks differ by ")
    assert found["reach"].text.startswith("others reach this machine at 127.0.0.1, from its own network")
    assert found["run"].grade is Grade.WARN  # as of a rendezvous
    assert found["run"].error is not None
    assert found["run"].error.code == "HP-NET-006"


def test_the_command_measures_all_of_it(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        done = CliRunner().invoke(app, ["bench", "--json", "--home", str(tmp_path / "home")])
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["schema"] == "hetpeer.bench/1"
    cores = document["machine"]["cores"]
    rows = {(row["what"], row["where"], row["dtype"], row["threads"]): row for row in document["speeds"]}
    for threads in {1, cores}:
        assert rows["product", "cpu", "float32", threads]["per_second"] > 1e7
        assert rows["copy", "cpu", "", threads]["per_second"] > 1e7
    for what, where in (("write", "disk"), ("send", "loopback")):
        assert rows[what, where, "", 0]["per_second"] > 1e5, rows
    assert [*tmp_path.iterdir()] == []


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = machine_speeds._tried("write", "disk", lambda: machine_speeds.written(tmp_path / "file"))
    assert found.per_second is None
    assert "not measured: " in found.line()
    with pytest.raises(RuntimeError):
        measure_flops(torch.device("cpu"), 0.1, torch.bool)


def test_a_line_has_its_unit() -> None:
    product = MeasuredSpeed(what="product", where="cpu", dtype="float32", threads=2, per_second=2e11)
    assert product.line().split() == ["product", "cpu", "float32", "2", "threads", "200", "GFLOP/s"]
    assert MeasuredSpeed(what="copy", where="cuda:0", per_second=float(3 << 30)).line().endswith(" 3 GiB/s")
