"""`hetpeer invite`: print the link with which others join a run, also as a QR code."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, TextIO

import typer

from hetpeer.peer.cli.options import plain
from hetpeer.peer.limits.amounts import counted

VOUCHER = "7d"
WHITE_ON_BLACK, AS_BEFORE = "\x1b[97;40m", "\x1b[0m"


def invite(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    *,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR",
            help="Where others reach the run: the router's address and port (203.0.113.7:31330), a name "
            "(example.org:31330) or"
            " any peer's address. Kept for later invites; '' forgets them. Repeatable.",
        ),
    ] = None,
    uses: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="For a run that takes invited peers only: add a voucher for N peers. Keep that link secret.",
        ),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", show_default=False, help="How long the voucher is valid: 12h, 7d. [default: 7d]"
        ),
    ] = None,
    qr: Annotated[bool, typer.Option("--qr", help="Draw a QR code as well.")] = False,
) -> None:
    """Print the invite to a run. Others give it to hetpeer join."""
    from hetpeer.bootstrap.run.admission_policies import ADMISSION_POLICIES
    from hetpeer.bootstrap.run.run_directory import RunDirectory
    from hetpeer.bootstrap.run.vouchers import new_voucher, sign_voucher
    from hetpeer.peer.arrival.invite_file import kept_invite, name_addresses, named_addresses, own_address
    from hetpeer.peer.cli.options import parse_duration

    run = RunDirectory.open(directory)
    named = [own_address(text, run) for text in bootstrap or () if text]
    invited = ADMISSION_POLICIES[run.manifest.admission.policy].takes_vouchers
    if uses is not None and not invited:
        raise typer.BadParameter(
            f"--uses is for runs that take invited peers only (hetpeer init --admission invited):"
            f" everybody may join {run.manifest.name}"
        )
    if expires is not None and uses is None:
        raise typer.BadParameter("--expires is for a voucher: give --uses as well")
    if bootstrap is not None:
        name_addresses(run, named)
    voucher = b""
    if uses is not None:
        expires = expires or VOUCHER
        signed = new_voucher(run.run_id, uses, int(time.time() + parse_duration(expires)))
        voucher = sign_voucher(signed, run.owner_key())
        typer.echo(f"voucher {signed.serial}: for {counted(uses, 'peer')}, valid for {expires}", err=True)
    elif invited:
        typer.echo("this run takes invited peers only: a link without --uses admits nobody new", err=True)
    link = str(kept_invite(run, named_addresses(run), voucher))
    if qr:
        draw(link, sys.stdout)
    typer.echo(link)


def draw(text: str, stream: TextIO) -> None:
    """Write `text` as a QR code of half blocks, light on dark whatever the colours of the terminal are."""
    import io

    import segno

    picture = io.StringIO()
    segno.make_qr(text, error="l").terminal(picture, border=2, compact=True)
    stream.writelines(
        f"{line}\n" if plain(stream) else f"{WHITE_ON_BLACK}{line}{AS_BEFORE}\n"
        for line in picture.getvalue().splitlines()
    )
