"""The invite to a run, kept in its directory: made by the reliable peer that serves it, shown again by `hetpeer invite`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from hetpeer.bootstrap.files import atomic_write
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.dht.addresses import Address, parse_address
from hetpeer.dht.errors import ExitCode, LocalError
from hetpeer.dht.node import Node
from hetpeer.peer.arrival.invites import Invite, make_invite, parse_invite, worth_giving

LOOK_S = 3.0

_log = logging.getLogger(__name__)


def keep_invite(run: RunDirectory, own: Iterable[Address], others: Sequence[Address]) -> Invite:
    """To `run`, which is served at `own`; those who come may also try `others`. Raises `LocalError` HP-DISK-*."""
    invite = make_invite(run.manifest.name, run.run_id, [*worth_giving(own), *others])
    atomic_write(run.invite_path, f"{invite}\n".encode())
    return invite


class Inviting:
    """To `run`, which `node` serves: the invite says where it is reached, and is made anew when that is learned later, as behind a router. `others` as in `keep_invite`."""

    def __init__(self, node: Node, run: RunDirectory, others: Sequence[Address]) -> None:
        self._node = node
        self._run = run
        self._others = others
        self._known: set[str] = set()

    def renewed(self) -> Invite | None:
        """The invite with where we are reached by now, kept; None if the last one has that. Raises as `keep_invite`."""
        now = self._node.addresses()
        if self._known.issuperset(now):
            return None
        invite = keep_invite(self._run, map(parse_address, now), self._others)
        self._known.update(now)
        return invite

    async def renew_forever(self, told: Callable[[Invite], None]) -> None:
        """Tell each new one."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                invite = self.renewed()
            except LocalError as error:
                _log.warning("the invite in %s is not made anew: %s", self._run.path, error)
                continue
            if invite is not None:
                told(invite)


def kept_invite(run: RunDirectory, more: Sequence[Address], voucher: bytes = b"") -> Invite:
    """The last one, with `more` addresses before its own and with `voucher`. Raises `LocalError` HP-RUN-017 where there is none, and no address."""
    kept: tuple[Address, ...] = ()
    why = ""
    try:
        invite = parse_invite(run.invite_path.read_text(errors="replace"))
        if invite.run == run.run_id:
            kept = invite.addresses
        else:
            why = "it was another run when it was served last"
    except OSError:
        why = "it was not served from here yet"
    except LocalError as error:
        why = f"{run.invite_path}: {error.why}"
    if not kept and not more:
        raise LocalError(
            "HP-RUN-017",
            f"no address is known for an invite to {run.path}",
            why=why,
            fix=f"start hetpeer bootstrap {run.path}, or say an address: hetpeer invite {run.path} --bootstrap ADDR",
            exit_code=ExitCode.CONFIG,
        )
    return make_invite(run.manifest.name, run.run_id, [*more, *kept], voucher)
