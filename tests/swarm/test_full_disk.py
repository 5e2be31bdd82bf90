"""The disk of the reliable peer is full: it says so, waits for room, and loses nothing."""

import asyncio
import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode
from tests.swarm.child import BUSY_S, POLL_S, Child, until
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
DISK = 48 << 20


class SmallDisk:
    """A disk of `DISK` bytes in the namespace of a process that does nothing else: it ends with it."""

    def __init__(self, there: Path) -> None:
        there.mkdir()
        rights = ["--user", "--map-root-user"] if os.geteuid() else []
        mount = f"mount -t tmpfs -o size={DISK} tmpfs {there} && echo mounted && exec sleep infinity"
        self._keeper = subprocess.Popen(
            ["unshare", *rights, "--mount", "sh", "-c", mount], stdout=subprocess.PIPE, text=True
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == "mounted\n"
        self.there = there
        """Path of the disk for processes that are `on_it`."""
        self.path = Path(f"/proc/{self._keeper.pid}/root{there}")
        """Path of the disk for this process."""

    @property
    def on_it(self) -> str:
        """`before` of a process that has the disk."""
        return f"on_the_disk_of:{self._keeper.pid}"

    def fill(self) -> None:
        """Leave no free byte."""
        with (self.path / "ballast").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    def free(self) -> None:
        (self.path / "ballast").unlink()

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk")
    yield disk
    disk.close()


async def test_it_waits_for_room_at_the_start(swarm: Swarm, disk: SmallDisk) -> None:
    """Two lines in all: one when it begins to wait, one when it starts. Page and status say it meanwhile."""
    run, there = disk.path / "run", disk.there / "run"
    copytree(swarm.run.path, run)
    swarm.run = RunDirectory.open(run)
    disk.fill()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    waiting = swarm.reliable(there, "--dashboard", "0", home=there, before=disk.on_it)
    await waiting.says("HP-DISK-002")
    asked = swarm.start("owner", "status", "--home", str(there), before=disk.on_it)
    await asked.ended()
    why = "No space left on device: 0 bytes are free, 1,048,576 are needed"
    lines = asked.printed.splitlines()
    assert lines[0].startswith("here      waiting (no room) since "), asked.printed + asked.said
    assert lines[1].startswith(f"why       HP-DISK-002: no room to write {there}; why: {why}; do: "), lines
    await page_warns(waiting, ("no room to write run", why))
    assert before.items() <= {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}.items()
    assert waiting.status is None

    disk.free()
    await until(lambda: waiting.printed, "volunteers may join")
    assert "there is room" in waiting.said
    assert waiting.said.count("HP-DISK-002") == 1
    await until(lambda: [record["kind"] for record in swarm.records()] == ["reign"], "it coordinates")
    await page_warns(waiting)


@pytest.mark.proof
async def test_a_volunteer_without_room_ends_and_comes_back(swarm: Swarm, disk: SmallDisk) -> None:
    """Its last line says why, no file is half-written, and with room it goes on."""
    bootstrap = await swarm.bootstrap(before="patient", together=2)
    home = disk.there / "home"
    full, other = swarm.volunteer("full", home=home, before=disk.on_it), swarm.volunteer("other")
    await swarm.committed(3)
    disk.fill()
    assert await full.ended() == ExitCode.TOO_SMALL
    assert full.said.splitlines()[-1].startswith(f"HP-DISK-002: no room to write {home}/"), full.said
    kept = [disk.path / "home" / name for name in ("config.toml", "identity.key", "peers.json")]
    before = [path.read_bytes() for path in kept]
    owner = swarm.start(
        "owner", "config", "set", "limits.up", "5mbit", "--home", str(home), before=disk.on_it
    )
    assert await owner.ended() == ExitCode.TOO_SMALL
    assert "config.toml; why: No space left on device: 0 bytes are free, " in owner.said
    again = swarm.volunteer("full", "--ram-limit", "5GiB", home=home, before=disk.on_it)
    assert await again.ended() == ExitCode.TOO_SMALL
    assert re.search("these options count for this time only: .*limits.ram 5GiB; why: no room", again.said)
    assert [path.read_bytes() for path in kept] == before
    disk.free()
    back = swarm.volunteer("full", home=home, before=disk.on_it)
    await swarm.finished(bootstrap, back, other)
    swarm.exact()


async def test_the_only_holder_of_a_block_hands_it_over_when_it_has_no_room(
    swarm: Swarm, disk: SmallDisk
) -> None:
    """It cannot write its evidence any more; no committed step is lost, and all of its lines are kept."""
    training = swarm.run.manifest.training.model_copy(update={"steps": 100_000, "checkpoint_every": 50_000})
    swarm.run = resign(swarm.run, training=training)
    await swarm.bootstrap("--keep-places")
    full = swarm.volunteer("full", home=disk.there / "home", before=disk.on_it)
    other = swarm.volunteer("other")
    await swarm.committed(3)
    disk.fill()
    assert await full.ended() == ExitCode.TOO_SMALL
    assert full.said.splitlines()[-1].startswith(f"HP-DISK-002: no room to write {full.home}/"), full.said
    records = swarm.records()
    committed = max(record["step"] for record in records if record["kind"] == "commit") + 1
    assert [r["version"] for r in records if r["kind"] == "checkpoint"][-1] == committed
    assert all(r["to_version"] == committed for r in records if r["kind"] == "rollback")
    assert "it hands over what it alone holds, and leaves" in full.said
    assert "the run goes back to its last checkpoint" not in full.said
    disk.free()
    back = swarm.volunteer("full", home=full.home, before=disk.on_it)
    await swarm.committed(committed + 2)
    await swarm.left([back, other])


async def page_warns(child: Child, *told: tuple[str, str]) -> None:
    """Return once the page of `child` has the warnings HP-DISK-002 that are `told`: what, and why.

    A page that nobody watches is renewed every ten seconds.
    """
    await child.says("dashboard at ")
    url, token = re.findall(r"dashboard at (\S+)/#token=(\S+)", child.said)[-1]
    request = urllib.request.Request(f"{url}/api/v1/view", headers={"Authorization": f"Bearer {token}"})

    def ask() -> Any:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)["warnings"]

    found: list[tuple[str, str]] | None = None
    async with asyncio.timeout(BUSY_S):
        while found != [*told]:
            all_found = await asyncio.to_thread(ask)
            found = [(one["what"], one["why"]) for one in all_found if one["code"] == "HP-DISK-002"]
            await asyncio.sleep(POLL_S)
