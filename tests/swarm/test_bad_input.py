"""What users and machines get wrong: one line that says what, why and what to do; the right exit status;
nothing half done.
"""

import re
import signal
import socket
from dataclasses import replace

import pytest
from blake3 import blake3

from hetpeer.averaging import messages as m
from hetpeer.dht.base.errors import ExitCode
from hetpeer.dht.kademlia.first_contact import MAX_CLOCK_OFFSET_S
from hetpeer.stages.graph.block_wire import pack_block
from tests.swarm.child import LEAVE_S, Child
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


async def fails(child: Child, status: ExitCode, code: str, *words: str) -> None:
    """`child` ends with `status` and says one thing."""
    assert await child.ended() == status, child.said
    errors = [line for line in child.said.splitlines() if line.startswith("HP-")]
    assert len(errors) == 1, child.said
    assert errors[0].startswith(f"{code}: ")
    assert "; do: " in errors[0]
    for word in words:
        assert word in errors[0]


async def test_nobody_there(swarm: Swarm) -> None:
    nobody = "/ip4/127.0.0.1/tcp/1/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
    garbled = swarm.volunteer("garbled", via="127.0.0.1:31330")
    alone = swarm.volunteer("alone", via=nobody, before="gives_up_soon")
    await fails(garbled, ExitCode.USAGE, "HP-ADDR-001", "/ip4/")
    await fails(alone, ExitCode.NETWORK, "HP-NET-002", "nothing listens there")
    assert re.findall(r"next try in (\d+) s", alone.said) == ["1"]
    assert not garbled.home.exists()
    kept = {"identity.key", "identity.key.lock", "daemon.log", "config.toml"}  # also what its owner allows
    assert {path.name for path in alone.home.iterdir()} == kept


async def test_the_run_directory_is_damaged(swarm: Swarm) -> None:
    """Each kind of damage is found before anything is served."""
    path = swarm.run.path
    shard = next((path / "data").iterdir())
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    await fails(serve(swarm), ExitCode.VERSION, "HP-RUN-005", shard.name, f"not {len(whole)}")
    shard.write_bytes(whole)

    manifest = path / "manifest.hetpeer"
    sound = manifest.read_bytes()
    damaged = bytearray(sound)
    damaged[len(sound) // 2] ^= 1
    manifest.write_bytes(damaged)
    await fails(serve(swarm), ExitCode.VERSION, "HP-RUN-003")
    manifest.unlink()
    await fails(serve(swarm), ExitCode.CONFIG, "HP-RUN-004")
    manifest.write_bytes(sound)

    (path / "log").rmdir()
    (path / "log").write_text("in the way")
    await fails(serve(swarm), ExitCode.CONFIG, "HP-DISK-001", "ledger.log")
    (path / "log").unlink()
    (path / "log").mkdir()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        await fails(serve(swarm, port), ExitCode.NETWORK, "HP-NET-001", str(port))
    assert not swarm.records()


def serve(swarm: Swarm, port: int = 0) -> Child:
    return swarm.start(
        "bootstrap", "bootstrap", str(swarm.run.path), "--host", "127.0.0.1", "--port", str(port)
    )


async def test_a_volunteer_that_cannot_take_part(swarm: Swarm) -> None:
    """Too small, too full, too old, too late, nowhere to write: the bootstrap node lives on, and leaves
    when asked.
    """
    bootstrap = await swarm.bootstrap()
    in_the_way = swarm.folder / "file"
    in_the_way.touch()
    homeless = swarm.volunteer("homeless", home=in_the_way)
    full = swarm.volunteer("full", before="small_disk")
    late = swarm.volunteer("late", before="clock_behind")
    small = swarm.volunteer("small", "--ram-limit", "256KiB")
    newer = swarm.volunteer("newer", before="newer_wire")
    await fails(homeless, ExitCode.CONFIG, "HP-DISK-001", "file")
    await fails(full, ExitCode.TOO_SMALL, "HP-DISK-002", "no room")
    await fails(late, ExitCode.NETWORK, "HP-NET-004")
    (behind,) = re.findall(r"(\d+) s behind", late.said)
    assert abs(int(behind) - 600) <= MAX_CLOCK_OFFSET_S, late.said
    await fails(small, ExitCode.TOO_SMALL, "HP-MEM-004", "--ram-limit")
    await fails(newer, ExitCode.VERSION, "HP-RUN-002", f"wire version {m.WIRE_VERSION + 1}")

    starting = swarm.volunteer("starting")
    bootstrap.signal(signal.SIGINT)
    starting.signal(signal.SIGTERM)
    assert await bootstrap.ended(LEAVE_S) == ExitCode.OK
    assert await starting.ended(LEAVE_S) in (ExitCode.OK, -signal.SIGTERM)
    assert [record["kind"] for record in swarm.records()].count("reign") == 1


async def test_a_graph_that_is_not_what_it_says(swarm: Swarm) -> None:
    """Its author has signed it, so no other copy is better: who is to compute it says what its worker
    found, and ends.
    """
    blocks = []
    for entry in swarm.run.manifest.blocks:
        spec = swarm.run.block_spec(entry)
        packed = pack_block(replace(spec, flops_forward=spec.flops_forward + 1))
        swarm.run.graph_path(entry).write_bytes(packed)
        graph = entry.graph.model_copy(update={"blake3": blake3(packed).hexdigest(), "bytes": len(packed)})
        blocks.append(entry.model_copy(update={"graph": graph}))
    swarm.run = resign(swarm.run, blocks=tuple(blocks))
    await swarm.bootstrap()
    await fails(swarm.volunteer("careful"), ExitCode.VERSION, "HP-RUN-025", "FLOPs and takes")


async def test_a_damaged_manifest_is_not_believed(swarm: Swarm) -> None:
    await swarm.bootstrap(before="serve_damaged_manifest")
    volunteer = swarm.volunteer("careful")
    await fails(volunteer, ExitCode.VERSION, "HP-RUN-003")
    assert not (volunteer.home / "runs").exists()
