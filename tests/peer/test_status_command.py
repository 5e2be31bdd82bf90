"""What `hetpeer status` makes of a swarm's adverts, and the command against a real one."""

import asyncio
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop
from rich.console import Console

from hetpeer.bootstrap.log.credit_ranking import ranking
from hetpeer.bootstrap.log.departure_counts import DepartureCounts
from hetpeer.bootstrap.log.moves import Move, MovePromise, MoveResult
from hetpeer.bootstrap.run.manifest_files import DataSettings
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import AveragingSettings, LinkSettings, TrustSettings
from hetpeer.bootstrap.storage.file_service import PROTOCOL, FileService, ServedRunFiles
from hetpeer.dht.base.errors import ExitCode
from hetpeer.dht.discovery import MAX_LINKS, Advert, LinkNote, Roster
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.kademlia.table import MAX_TTL_S
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.reach import reachability
from hetpeer.peer.arrival.destinations import remember
from hetpeer.peer.cli.swarm import status_command
from hetpeer.peer.cli.swarm.peer_text import duration
from hetpeer.peer.cli.swarm.status_text import Here, lines, own_lines, tables
from hetpeer.peer.control.control_messages import DaemonStatus, LinkStatus, VolunteerStatus, decode_answer
from hetpeer.peer.daemon.presence import no_state
from hetpeer.peer.limits.nvml import GpuLoad
from hetpeer.peer.training.self_advert import link_notes
from hetpeer.peer.transport.link_book import LinkBook
from hetpeer.peer.watching.status_summary import LogFigures, summarise
from hetpeer.peer.watching.swarm_status import SwarmStatus
from hetpeer.peer.web.machine_load import MachineLoad
from tests.bootstrap.engine import make_run

FIGURES = VolunteerStatus(
    pid=os.getpid(),
    run="tiny-llm",
    unit="tokens",
    steps=1000,
    step=250,
    blocks=(2, 4),
    units_per_second=1940.0,
    microbatches=123,
    computes=0.75,
    lines=(LinkStatus(to="4bX8Qw", way="direct", bytes_per_second=2.5e6),),
)


def test_own_volunteer_and_machine() -> None:
    load = MachineLoad(
        cpu=0.5,
        own_cores=1.25,
        memory_used=3 << 30,
        memory_total=8 << 30,
        own_memory=1 << 30,
        disk_free=5 << 30,
    )
    gpu = GpuLoad(name="Card 0", busy=0.87, memory_used=3 << 30, memory_total=12 << 30)
    shown = dict(own_lines(Here(DaemonStatus(state="training", since=0.0, figures=FIGURES), load, (gpu,))))
    assert shown["here"].startswith("training since ")
    assert shown["you"] == "1,940 tokens/s, 75% of the time computing, 123 microbatches  blocks 2-3"
    assert shown["link"] == "you → …4bX8Qw  direct, 20.0 Mbit/s"
    assert shown["processor"] == "50% of all cores busy; hetpeer uses 1.2 cores"
    assert shown["memory"] == "3 GiB of 8 GiB used; hetpeer uses 1 GiB"
    assert shown["disk"] == "5 GiB free"
    assert shown["gpu"] == "Card 0  87% busy, 3 GiB of 12 GiB used by all programs"


def test_a_link_whose_frames_took_no_time_has_no_speed() -> None:
    links = (LinkStatus(to="4bX8Qw", way="direct", bytes_per_second=6.5e13),)
    daemon = DaemonStatus(state="training", since=0.0, figures=FIGURES.model_copy(update={"lines": links}))
    assert dict(own_lines(Here(daemon)))["link"] == "you → …4bX8Qw  direct, too fast to measure"


def test_unknown_figures_are_left_out() -> None:
    few = VolunteerStatus(pid=1, run="r", unit="samples", steps=5)
    assert [label for label, _ in own_lines(Here(DaemonStatus(state="waiting", since=0.0)))] == ["here"]
    shown = own_lines(Here(DaemonStatus(state="waiting", since=0.0, figures=few)))
    assert [label for label, _ in shown] == ["here", "you"]
    assert list(own_lines(None)) == []


def test_figures_travel_and_older_daemons_have_none() -> None:
    standing = DaemonStatus(state="training", since=1.5, figures=FIGURES)
    assert decode_answer(standing.encode()) == standing
    assert decode_answer(b'{"schema": "hetpeer.control/1", "state": "waiting", "since": 1.0}').figures is None


def test_load_is_that_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [DaemonStatus(state="training", since=0.0, figures=FIGURES)] * 2
    gone = FIGURES.model_copy(update={"pid": 2**22})  # no process has that id
    answers += [DaemonStatus(state="training", since=0.0, figures=gone)]
    monkeypatch.setattr(status_command, "standing_here", lambda _home: answers.pop(0) if answers else None)
    here = status_command._Looks(tmp_path, load=True)
    first, second, third = here(), here(), here()
    assert first is not None
    assert first.load is None
    assert second is not None
    assert second.load is not None
    assert second.load.own_memory > 0
    assert third is not None
    assert third.load is None
    assert here() is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Four steps of four microbatches of two sequences of 16 tokens; four blocks."""
    return make_run(tmp_path_factory.mktemp("status"))


def volunteer(begin: int, end: int, state: str = "training", **fields: object) -> Advert:
    return Advert(role="volunteer", state=state, block_begin=begin, block_end=end, **fields)


def look(run: RunDirectory, **adverts: Advert) -> SwarmStatus:
    named = {run.manifest.coordinators[0] if peer == "boss" else peer: a for peer, a in adverts.items()}
    return summarise(run.signed, named, 1000.0)


def test_moves_are_shown_with_what_they_promised_and_what_came(run: RunDirectory) -> None:
    promise = MovePromise(before_s=31.8, after_s=27.2, moving_s=13.0, blocks=20)
    settled = Move(step=2, promise=promise, result=MoveResult(after_s=32.9, moving_s=45.0))
    newer = Move(step=9, promise=promise.model_copy(update={"before_s": None, "blocks": 1}))
    found = summarise(run.signed, {}, 1000.0, told=LogFigures(moves=(settled, newer)))
    assert [line for line in lines(found) if line.startswith("move ")] == [
        (
            "move      step 2: 20 blocks moved; 27.2 s a step instead of 31.8 s promised, for 13 s of "
            "moving; it took 45 s; a step takes 32.9 s now"
        ),
        "move      step 9: 1 block moved; 27.2 s a step promised, for 13 s of moving; it has not settled yet",
    ]
    console = Console(width=300, file=io.StringIO())
    console.print(tables(found))
    assert "20 blocks moved" in console.file.getvalue()
    first, second = json.loads(json.dumps(found.document()))["moves"]
    del first["text"], second["text"]
    assert first == {
        "step": 2,
        "blocks": 20,
        "before_s": 31.8,
        "promised_s": 27.2,
        "promised_moving_s": 13.0,
        "after_s": 32.9,
        "moving_s": 45.0,
        "settled": True,
    }
    assert (second["settled"], second["after_s"], second["before_s"]) == (False, None, None)
    assert look(run).document()["moves"] is None


def coordinator(**fields: object) -> Advert:
    return Advert(**({"role": "coordinator", "state": "training"} | fields))


def test_swarm_at_work(run: RunDirectory) -> None:
    last = len(run.manifest.blocks)
    found = look(
        run,
        boss=coordinator(step=2, loss=3.5, tokens_per_second=64.0),
        a=volunteer(0, 2, name="alpha", step=1, tokens_per_second=30.0),
        b=volunteer(1, last, step=2),
        c=volunteer(0, last, state="syncing"),
    )
    assert (found.state, found.reason, found.run.id) == ("training", "", run.run_id)
    assert [row.holders for row in found.blocks[:3]] == [("a",), ("a", "b"), ("b",)]
    assert (found.swarm.volunteers, found.swarm.working, found.swarm.coordinator) == (3, 2, True)
    assert (found.swarm.weakest_block, found.swarm.weakest_holders) == (0, 1)
    assert (found.progress.step, found.progress.steps, found.progress.loss) == (2, 4, 3.5)
    assert found.progress.eta_s == 2 * (4 * 2 * 16) / 64.0


def test_links_and_what_is_saved_on_them(run: RunDirectory) -> None:
    book = LinkBook(LinkSettings())
    for number in range(1, 7):
        book.measured(f"the peer {number}", 1e6 * number, 0.0)
        for _ in range(80):
            book.sent(f"the peer {number}", 1 << 20, 1 << 18, gradient=False)
        book.coding(f"the peer {number}", 1 << 20, 4.0, gradient=False)
    book.measured("unused", 1.0, 0.0)
    links = book.links
    notes = tuple(
        link_notes(
            links, lambda peer: reachability.PeerPath(relay="the relay" if peer == "the peer 1" else "")
        )
    )
    assert [note.to for note in notes] == [f"e peer {number}" for number in range(1, MAX_LINKS + 1)]
    advert = volunteer(0, 1, name="alpha", links=notes[:1])
    assert Advert.from_map(advert.to_map(), peer="a") == advert
    others = {"the peer 1": volunteer(1, 2, name="beta"), "the relay": volunteer(0, 1, name="gamma")}
    found = look(run, **{"a": advert, **others})
    (line,) = [line for line in lines(found) if line.startswith("link")]
    facts = "through gamma, 8.0 Mbit/s, 4.0 times smaller, 60 MiB saved"
    assert line.split("  ", 1)[1].strip() == f"alpha → beta  {facts}"
    assert [note.path for note in notes] == ["through he relay", "direct", "direct", "direct"]


@pytest.mark.parametrize(
    ("note", "why"),
    [
        (LinkNote(to="b"), ""),
        (LinkNote(to="b", codec="none", rate=1e6), ""),
        (LinkNote(to="b", codec="none", aim_s=1.2), "none: the line is not measured yet"),
        (
            LinkNote(to="b", codec="int8", aim_s=1.2, rate=1e6, activation_bytes=400_000),
            "int8: the line takes 0.4 s of 1.2 s a microbatch",
        ),
        (
            LinkNote(to="b", codec="topk-int4", aim_s=40.0, rate=1e6, gradient_bytes=40_000),
            "topk-int4: the line takes 40 ms of 40 s a microbatch",
        ),
    ],
)
def test_why_a_link_has_its_codec(run: RunDirectory, note: LinkNote, why: str) -> None:
    found = look(run, a=volunteer(0, 1, name="alpha", links=(note,)))
    assert [link["why"] for peer in found.document()["peers"] for link in peer["links"]] == [why]
    assert any(line.endswith(why) for line in lines(found) if line.startswith("link"))


def test_what_a_peer_offers_before_it_has_a_place(run: RunDirectory) -> None:
    gib = 1 << 30
    gpu = {"memory_bytes": 21 * gib, "gpu_bytes": 42 * gib, "host_bytes": 12 * gib, "device": "2 x A10"}
    found = look(
        run,
        new=volunteer(0, 0, name="attic", state="joining", uplink=2.5e6, downlink=12.5e6, **gpu),
        old=volunteer(0, 1, name="cellar", memory_bytes=3 * gib),
    )
    rows = {row.split()[3]: row for row in lines(found) if row.startswith("peer")}
    assert rows["attic"].endswith("2 x A10  42 GiB GPU, 12 GiB RAM  20.0 Mbit/s up, 100.0 Mbit/s down"), rows[
        "attic"
    ]
    assert rows["cellar"].endswith("step 0  3 GiB RAM")
    (row,) = [row for row in found.document()["peers"] if row["name"] == "attic"]
    told = {key: row[key] for key in ("ram_bytes", "gpu_bytes", "uplink", "downlink")}
    assert told == {"ram_bytes": 12 * gib, "gpu_bytes": 42 * gib, "uplink": 2.5e6, "downlink": 12.5e6}


def test_how_steady_each_peer_is(run: RunDirectory) -> None:
    peers = {"ada": "Qm" + "a" * 44, "bob": "Qm" + "b" * 44, "new": "Qm" + "c" * 44}
    adverts = {peer: volunteer(0, 1, name=name, up_s=7500.0) for name, peer in peers.items()}
    adverts[run.manifest.coordinators[0]] = coordinator(up_s=7500.0)
    counted = DepartureCounts(peers={peers["ada"]: 1, peers["bob"]: 12}, complete=True)
    found = summarise(run.signed, adverts, 1000.0, told=LogFigures(departures=counted))
    said = [row for row in lines(found) if row.startswith("peer")]
    assert [row.partition("here ")[2] for row in said if "volunteer" in row] == [
        "2h 05m, left once",
        "2h 05m, left 12 times",
        "2h 05m, never left",
    ]
    assert [row.partition("here ")[2] for row in said if "coordinator" in row] == ["2h 05m"]
    assert {row["departures"] for row in found.document()["peers"]} == {0, 1, 12}
    nobody_answers = summarise(run.signed, adverts, 1000.0)
    assert not any("left" in row for row in lines(nobody_answers))


@pytest.mark.parametrize("width", [80, 120])
def test_tables_are_readable_in_narrow_terminals(run: RunDirectory, width: int) -> None:
    """No word is torn: cells wrap between words."""
    words = {"memory_bytes": 21 << 30, "gpu_bytes": 42 << 30, "device": "2 x A10", "up_s": 7500.0}
    found = look(run, a=volunteer(0, 1, name="attic", uplink=2.5e6, downlink=12.5e6, **words))
    output = io.StringIO()
    Console(file=output, width=width).print(tables(found))
    shown = output.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    for word in ("attic", "training", "volunteer", "Mbit/s", "GiB", "GPU,", "RAM", "here", "A10"):
        assert word in shown, shown


def test_who_is_reached_how(run: RunDirectory) -> None:
    adverts = {
        "open": volunteer(0, 1, name="alpha", reach="public", reach_peers=2),
        "closed": volunteer(0, 1, name="beta", reach="private", relays=("therelay",)),
        "alone": volunteer(0, 1, name="delta", reach="private"),
        "new": volunteer(0, 1, name="epsilon", reach="unknown"),
        "therelay": volunteer(0, 1, name="gamma"),
    }
    found = look(run, **adverts)
    rows = {row.split()[3]: row for row in lines(found) if row.startswith("peer")}
    assert rows["alpha"].endswith("  directly")
    assert rows["beta"].endswith("  through gamma")
    assert rows["delta"].endswith("  by nobody")
    assert rows["epsilon"].endswith("step 0")
    assert rows["gamma"].endswith("step 0")
    two = {
        name: volunteer(0, 1, reach="private", links=(LinkNote(to=to, path="direct"),))
        for name, to in ("ab", "ba")
    }
    assert [row.links[0].path for row in look(run, **two).peers] == ["punched", "punched"]
    assert [row.links[0].path for row in look(run, a=two["a"], b=volunteer(0, 1)).peers[:1]] == ["direct"]
    (row,) = [row for row in found.document()["peers"] if row["name"] == "beta"]
    assert (row["reach"], row["reach_peers"], row["relays"]) == ("private", 0, ("therelay",))


def test_without_coordinator_the_volunteers_tell(run: RunDirectory) -> None:
    last = len(run.manifest.blocks)
    found = look(
        run,
        a=volunteer(0, 1, step=1, loss=4.0, tokens_per_second=10.0),
        b=volunteer(0, last, step=3, loss=3.0, tokens_per_second=5.0),
        liar=volunteer(0, last, state="joining", step=2**50),
    )
    assert (found.state, found.swarm.coordinator) == ("waiting", False)
    assert "coordinator" in found.reason
    assert (found.progress.step, found.progress.loss) == (3, 3.0)
    assert found.swarm.tokens_per_second == 5.0


def test_self_made_coordinator_is_none(run: RunDirectory) -> None:
    found = look(run, somebody=coordinator(step=4))
    assert (found.swarm.coordinator, found.progress.step, found.state) == (False, 0, "waiting")


def test_uncovered_block_is_named(run: RunDirectory) -> None:
    found = look(run, boss=coordinator(state="waiting"), a=volunteer(1, len(run.manifest.blocks)))
    assert (found.state, found.reason) == ("waiting", "nobody holds block 0")


def spot_checked(run: RunDirectory, **more: object) -> SimpleNamespace:
    """The run as it would be with spot checks."""
    manifest = run.manifest.model_copy(update={"trust": TrustSettings(spot_checks=0.05), **more})
    return SimpleNamespace(manifest=manifest, run_id=run.run_id, reliable=run.signed.reliable)


def test_whom_no_spot_check_can_find_out(run: RunDirectory) -> None:
    last = len(run.manifest.blocks)
    adverts = {
        "first": volunteer(0, 2, name="alpha"),
        "whole": volunteer(0, last, name="beta"),
        "across": volunteer(1, last, name="gamma"),
        "comes": volunteer(0, last, name="delta", state="syncing"),
    }
    assert look(run, **adverts).unchecked == (), "in a run without"
    found = summarise(spot_checked(run), adverts, 1000.0)
    assert found.unchecked == ("whole",)
    (line,) = [line for line in lines(found) if line.startswith("unchecked")]
    facts = "nobody else holds all of their blocks, so spot checks cannot examine their work"
    assert line == f"unchecked beta (blocks 0-{last - 1}): {facts}"
    grouped = summarise(spot_checked(run, averaging=AveragingSettings()), adverts, 1000.0)
    assert grouped.unchecked == ("across", "first", "whole"), (
        "in its own pipeline each is alone at its blocks"
    )


def test_of_many_that_are_not_checked_some_are_named(run: RunDirectory) -> None:
    adverts = {
        f"peer {begin}{end}": volunteer(begin, end, name=f"{begin}{end}")
        for begin, end in ((0, 1), (1, 2), (2, 3), (3, 4))
    }
    few = summarise(spot_checked(run), adverts, 1000.0)
    many = replace(few, unchecked=(*few.unchecked, *few.unchecked))
    assert "01 (block 0), 12 (block 1), 23 (block 2), 34 (block 3), 01 (block 0) and 3 more: " in "\n".join(
        lines(many)
    )


def test_finished_and_empty(run: RunDirectory) -> None:
    assert look(run, boss=coordinator(step=9)).state == "finished"
    nothing = look(run)
    assert (nothing.peers, nothing.progress.eta_s, nothing.swarm.weakest_holders) == ((), None, 0)


def test_rendering_takes_names_literally(run: RunDirectory) -> None:
    from io import StringIO

    from rich.console import Console

    found = look(
        run,
        boss=coordinator(step=2, loss=3.5, tokens_per_second=64.0),
        a=volunteer(0, len(run.manifest.blocks), name="[red]x[/]", device="cpu"),
    )
    text = "\n".join(lines(found))
    assert "step 2/4 (50%)  loss 3.5000  64 tok/s  ETA 4s" in text
    assert f"blocks    0-{len(run.manifest.blocks) - 1}  [red]x[/]" in text
    output = StringIO()
    Console(file=output, width=120).print(tables(found))
    assert "[red]x[/]" in output.getvalue()


def test_who_has_contributed_most(run: RunDirectory) -> None:
    """The first ten and, behind them, the one who asks; names only of those who are here."""
    peers = [f"Qm{letter * 20}" for letter in "ABCDEFGHJKLM"]
    credit = {peer: 1200 - 100 * place for place, peer in enumerate(peers)}
    adverts = {peers[1]: volunteer(0, 1, name="beta"), peers[11]: volunteer(0, 1, name="mu")}
    found = summarise(run.signed, adverts, 1000.0, told=LogFigures(ranking(credit, peers[11])))
    told = [line.split("  ", 1)[1].strip() for line in lines(found) if line.startswith("credit")]
    assert told[:2] == [
        "1.  …AAAAAA  1,200 tok x blocks (15.4%)",
        "2.  beta  1,100 tok x blocks (14.1%)",
    ]
    assert (len(told), told[10]) == (11, "12.  mu, you  100 tok x blocks (1.3%)")
    document = json.loads(json.dumps(found.document()))["credit"]
    assert (document["total"], document["contributors"], len(document["first"])) == (7800, 12, 12)
    assert document["yours"] == {"peer": peers[11], "name": "mu", "rank": 12, "credit": 100}
    none = summarise(run.signed, {}, 1000.0, told=LogFigures(ranking({}, peers[0])))
    assert [line for line in lines(none) if line.startswith("credit")] == [
        "credit    -  …AAAAAA, you  0 tok x blocks"
    ]


def test_speeds_of_other_data_are_in_samples(run: RunDirectory) -> None:
    data = DataSettings(
        kind="arrays",
        sample={"x": {"dtype": "int8", "shape": [1]}},
        **run.manifest.data.model_dump(include={"train", "heldout"}),
    )
    other = replace(run.signed, manifest=run.manifest.model_copy(update={"data": data}))
    boss = coordinator(step=2, tokens_per_second=4.0)
    found = summarise(other, {run.manifest.coordinators[0]: boss}, 1000.0)
    assert found.progress.eta_s == 2 * (4 * 2) / 4.0
    assert any("  4 samples/s" in line for line in lines(found))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m 00s"), (3725, "1h 02m"), (266_400, "3d 02h")]
)
def testduration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def serve_and_ask(run: RunDirectory, home: Path) -> list[tuple[int, str, str]]:
    """A volunteer's node, without any coordinator; the command asks it by --bootstrap and by the home's
    addresses.
    """

    node = await Node.start(NodeConfig(), Identity.create(home / "identity.key"))
    try:
        await node.serve(
            PROTOCOL, FileService(ServedRunFiles(run, MembershipConfig(run.signed, home), no_state)).handle
        )
        advert = volunteer(
            0, len(run.manifest.blocks), name="alpha", step=1, loss=4.5, addresses=tuple(node.addresses())
        )
        assert await Roster(node, run.run_id).publish(advert, ttl_s=MAX_TTL_S)
        remember(home, run.run_id, [parse_address(node.addresses()[0])])
        asks = (["--json", "--bootstrap", node.addresses()[0]], ["--home", str(home)])
        return [await asyncio.to_thread(hetpeer_status, *ask) for ask in asks]
    finally:
        await node.close()


def hetpeer_status(*arguments: str) -> tuple[int, str, str]:
    result = subprocess.run(
        [sys.executable, "-m", "hetpeer.peer.cli.main", "status", *arguments],
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    return result.returncode, result.stdout, result.stderr


@pytest.mark.swarm
def test_command_asks_through_a_volunteer(run: RunDirectory, tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        as_json, plain = runner.run(serve_and_ask(run, tmp_path))
    assert (as_json[0], as_json[2]) == (0, "")
    document = json.loads(as_json[1])
    assert set(document) == {
        "schema",
        "time",
        "state",
        "reason",
        "run",
        "peers",
        "blocks",
        "unchecked",
        "leftovers",
        "progress",
        "swarm",
        "credit",
        "moves",
        "plan",
        "here",
    }
    assert document["credit"] is None  # no reliable peer is there
    assert document["here"] is None
    assert (document["schema"], document["run"]["id"]) == ("hetpeer.status/1", run.run_id)
    assert abs(document["time"] - time.time()) < 120
    assert [peer["name"] for peer in document["peers"]] == ["alpha"]
    assert plain[0] == 0, plain[2]
    assert "step 1/4" in plain[1]


@pytest.mark.swarm
def test_nobody_there() -> None:
    peer = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
    code, stdout, stderr = hetpeer_status("--bootstrap", f"/ip4/127.0.0.1/tcp/9/p2p/{peer}")
    assert (code, stdout) == (ExitCode.NETWORK, "")
    assert stderr.startswith("HP-NET-002: ")
    assert stderr.count("\n") == 1
