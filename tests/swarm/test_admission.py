"""A door that takes invited peers only, and a ban, with real processes (docs/admission.md)."""

import re

import pytest
from typer.testing import CliRunner

from hetpeer.bootstrap.run.settings import AdmissionSettings
from hetpeer.dht.base.errors import ExitCode
from hetpeer.peer.cli import main
from tests.swarm.child import Child
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


def hetpeer(*arguments: str) -> str:
    result = CliRunner().invoke(main.app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def turned_away(child: Child, code: str) -> bool:
    return any(line.startswith(f"{code}: ") for line in child.said.splitlines())


async def test_only_who_is_invited_takes_part_and_until_it_is_banned(swarm: Swarm) -> None:
    settings = AdmissionSettings(policy="invited", work_bits=10, per_network=2)
    # it goes on until the author has typed all commands
    training = swarm.run.manifest.training.model_copy(update={"steps": 100_000, "eval_every": 100})
    swarm.run = resign(swarm.run, admission=settings, training=training)
    await swarm.bootstrap(before="soon_calm")
    stranger = swarm.volunteer("stranger")
    assert await stranger.ended() == ExitCode.RUN_CLOSED, stranger.said
    assert turned_away(stranger, "HP-RUN-020")

    link = hetpeer("invite", str(swarm.run.path), "--uses", "3").strip()
    guests = [swarm.volunteer(name, via=link) for name in ("anna", "ben")]
    for guest in guests:
        await guest.says("you are contributing")
    third = swarm.volunteer("third", via=link)
    assert await third.ended() == ExitCode.TRY_LATER, third.said
    assert turned_away(third, "HP-RUN-022"), "two of this network are here"
    admitted = swarm.records("admitted")
    assert {record["peer"] for record in admitted} == {guest.peer_id for guest in guests}
    assert len({record["serial"] for record in admitted}) == 1
    for kept in ("voucher", "work"):
        (path,) = guests[0].home.glob(f"runs/*/{kept}")
        assert path.stat().st_mode & 0o777 == 0o600

    gone = guests.pop()
    said = hetpeer("amend", str(swarm.run.path), "--ban", gone.peer_id)
    assert re.search(rf"^banned {gone.peer_id}$", said, re.MULTILINE)
    assert await gone.ended() == ExitCode.RUN_CLOSED, gone.said
    assert turned_away(gone, "HP-RUN-019")
    back = swarm.volunteer("back", home=gone.home)
    assert await back.ended() == ExitCode.RUN_CLOSED, back.said
    assert turned_away(back, "HP-RUN-019")

    await swarm.left_in_order(guests)
